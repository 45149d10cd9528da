"""The pages and their pictures, and how one is brought up to date."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import (
    api,
    decoders,
    figures,
    frontier,
    gpus,
    groups,
    llama,
    notebooks,
    operations,
    operators,
    passes,
    ray,
    serving,
    tables,
)
from .snippets import dumped, run_page

ROOT = Path(__file__).resolve().parents[2]

PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)

NOTEBOOKS = tuple(sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")))
"""Tutorials, whose cells are run."""

SECTIONS: dict[str, Callable[[], str]] = {
    "api": api.index,
    "api-prelude": api.prelude,
    **{f"api-{page}": partial(api.group, page) for page in api.PAGES},
    "environment": tables.environment,
    "ops": operations.reference,
    "phases": operations.phases,
    "decoders": decoders.reference,
    "decoders-reasons": decoders.reasons,
    "decoders-summary": decoders.summary,
    "operators": operators.reference,
    "operators-summary": operators.summary,
    "types": tables.element_types,
    "enums": tables.enumerations,
    "declarations": tables.declarations,
    "pipeline": passes.pipeline,
    "passes": passes.reference,
    "schedules": tables.schedules,
    "schedule-figures": figures.schedules,
    "auto-settings": frontier.random_settings,
    "auto-times": frontier.times,
    "groups-cpu": groups.steps,
    "all-reduce": groups.all_reduces,
    "groups-gpu": groups.on_gpus,
    "one-gpu": groups.one_gpu,
    "gpu-machine": gpus.machine,
    "gpu-round-trips": gpus.round_trips,
    "gpu-pipelines": gpus.pipelines,
    "gpu-others": gpus.others,
    "ray-times": ray.times,
    "ray-at-all-times": ray.at_all_times,
    "ray-throughput": ray.throughput,
    "soak": ray.soak,
    "serving-ablation": serving.ablation,
    "serving-ablation-nano": serving.ablation_nano,
    "slow-link": serving.slow_link,
    "llama-speed": llama.speed,
    "llama-speed-of-two": llama.speed_of_two,
    "llama-sizes": llama.sizes,
    "llama-sizes-of-two": llama.sizes_of_two,
    "llama-paper": llama.paper,
    "llama-paper-of-sizes": llama.paper_of_sizes,
    "llama-before": llama.before,
}
"""The sections that may stand between `<!-- generated: name -->` and `<!-- end -->`."""

PICTURES: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "images" / "timeline.svg": partial(
        dumped, ROOT / "README.md", "step.timeline.svg", ranks=3
    ),
    ROOT / "docs" / "images" / "gpu_round_trips.svg": gpus.round_trip_picture,
    ROOT / "docs" / "images" / "gpu_llama.svg": llama.picture,
    ROOT / "docs" / "images" / "schedule_frontier.svg": frontier.picture,
}
"""Images that pages show, drawn from what benchmarks have recorded."""

_SECTION = re.compile(r"(<!-- generated: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def render(page: Path) -> str:
    """The text that the page should have: sections generated anew, snippets run again.

    A picture is drawn anew, and a notebook is run.

    Raises:
        KeyError: the page asks for a section that there is not.
        SnippetError: a snippet does not do what it should.
    """
    if page in PICTURES:
        return PICTURES[page]()
    if page in NOTEBOOKS:
        return notebooks.render(page)

    def section(match: re.Match[str]) -> str:
        head, name, _, end = match.groups()
        return f"{head}\n{SECTIONS[name]().strip()}\n\n{end}"

    text = _SECTION.sub(section, page.read_text(encoding="utf-8"))
    return run_page(text, page.relative_to(ROOT))
