"""Snippets of pages, and tutorials, as files on ranks that have a GPU each.

tests/test_docs.py has one process play the ranks, and compares all that is printed. Here a page is
one program that has to come to its end, and of a tutorial the losses and comparisons are those that
it shows.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ..docs.test_tutorials import TUTORIALS, cells, ranks_of
from ..mpi import jobs
from . import programs
from .documented import PAGES, ROOT
from .playing import NEEDS, SECONDS, VARIABLES
from .programs import Program

pytestmark = [*jobs.needs_mpi, pytest.mark.timeout(600)]

GPUS = torch.cuda.device_count() or 2

PLAYED = {
    "docs/guide/collectives.md": "compares actors of all ranks",
    "docs/guide/looking.md": "reads files in the moment in which rank 0 writes them",
    "docs/guide/models.md": "looks at an actor of rank 1",
    "docs/howto/notebooks.md": "is a notebook: its ranks serve no graph",
    "docs/howto/optimizers.md": "looks at an actor of rank 0",
    "docs/howto/precision.md": "compares actors of all ranks",
    "docs/howto/reproducibility.md": "looks at an actor of rank 0",
}
"""Pages that only one process which plays all ranks can run, and why: tests/test_docs.py does."""

WRITTEN = [p for page in PAGES if (p := programs.of_page(str(page.relative_to(ROOT)))) is not None]
RUN = [program for program in WRITTEN if program.page not in PLAYED]

NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))

SAME = re.compile(r"\bloss\b|evaluation|True|False|^\d\.\d( \d\.\d)+$")
"""Lines of a tutorial that say the same on each device; others name bytes, or count ops."""

NUMBER = re.compile(r"\d+(?:\.\d+)?")


def ranks(program: Program) -> int:
    return min(GPUS, program.ranks) if program.scales else program.ranks


def needed(notebook: Path) -> int:
    """GPUs that a tutorial needs; 0 ranks are one process."""
    return ranks_of(notebook) or 1


def run_page(program: Program, folder: Path, device: str) -> None:
    absent = [need for need in program.needs if shutil.which(need) is None]
    if absent:
        pytest.skip(f"{program.page} needs {', '.join(absent)}")
    if "transformers" in program.text:
        pytest.importorskip("transformers")
    file = folder / "page.py"
    programs.write(program, file)
    variables = {**VARIABLES, "CG_DEVICE": device}
    ended = jobs.run(
        ranks(program), [str(file)], seconds=SECONDS, variables=variables, folder=folder
    )
    assert ended.code == 0, ended.output


def run_tutorial(notebook: Path, folder: Path, device: str) -> None:
    code = [cell for cell in cells(notebook) if cell["cell_type"] == "code"]
    text = "\n".join("".join(cell["source"]) for cell in code)
    wanted = [*NEEDS["serve"]] if "examples.serve" in text else []
    wanted += ["transformers"] if "transformers" in text else []
    for package in wanted:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{notebook.name} needs {package}, which is not installed")
    file = folder / f"{notebook.stem}.py"
    file.write_text(text, encoding="utf-8")
    count = ranks_of(notebook)
    path = os.pathsep.join([jobs.environment()["PYTHONPATH"], str(ROOT)])  # for examples.serve
    variables = {**VARIABLES, "CG_DEVICE": device, "PYTHONPATH": path}
    ended = jobs.run(count, [str(file)], seconds=SECONDS, variables=variables, folder=folder)
    assert ended.code == 0, ended.output
    shown = [
        line
        for cell in code
        for out in cell["outputs"]
        for line in "".join(out["text"]).splitlines()
        if line.strip() and (device == "cpu" or SAME.search(line))
    ]
    assert [line for line in shown if not is_in(line, ended.output, device)] == [], ended.output


def is_in(line: str, output: str, device: str) -> bool:
    """True if an output has a line; on devices decimals may differ by rounding."""
    if device == "cpu":
        return line in output
    return any(
        NUMBER.sub("", line) == NUMBER.sub("", other)
        and all(map(is_close, NUMBER.findall(line), NUMBER.findall(other)))
        for other in output.splitlines()
    )


def is_close(shown: str, number: str) -> bool:
    """True for equal counts, and losses that differ by 5 % or one in the last digit at most."""
    decimals = shown.partition(".")[2]
    if not decimals:
        return shown == number
    return float(number) == pytest.approx(float(shown), rel=0.05, abs=1.1 * 10 ** -len(decimals))


def page(program: Program, *, slow: bool) -> Any:
    marks = [pytest.mark.slow] if slow else [pytest.mark.gpu(ranks(program))]
    name = program.page.removeprefix("docs/").removesuffix(".md").replace("/", ".")
    return pytest.param(program, marks=marks, id=name)


def tutorial(notebook: Path, *, slow: bool) -> Any:
    marks = [pytest.mark.slow] if slow else [pytest.mark.gpu(needed(notebook))]
    return pytest.param(notebook, marks=marks, id=notebook.stem)


@pytest.mark.parametrize("program", [page(each, slow=False) for each in RUN])
def test_page_on_gpus(program: Program, tmp_path: Path) -> None:
    run_page(program, tmp_path, "cuda")


@pytest.mark.parametrize("program", [page(each, slow=True) for each in RUN])
def test_page_on_the_host(program: Program, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    run_page(program, tmp_path, pytestconfig.getoption("--device"))


@pytest.mark.parametrize("notebook", [tutorial(each, slow=False) for each in NOTEBOOKS])
def test_tutorial_on_gpus(notebook: Path, tmp_path: Path) -> None:
    run_tutorial(notebook, tmp_path, "cuda")


@pytest.mark.parametrize("notebook", [tutorial(each, slow=True) for each in NOTEBOOKS])
def test_tutorial_on_the_host(notebook: Path, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    run_tutorial(notebook, tmp_path, pytestconfig.getoption("--device"))


def test_lines_of_devices_are_compared_by_their_numbers() -> None:
    output = "seed 3\n5.6 2.9 1.5 0.3\n"
    assert is_in("5.6 2.9 1.5 0.4", output, "cuda")
    assert not is_in("5.6 2.9 1.5 0.4", output, "cpu")
    assert not is_in("5.6 2.9 1.5 0.6", output, "cuda")
    assert not is_in("seed 4", output, "cuda")


def test_all_pages_are_run_but_those_for_one_process() -> None:
    assert set(PLAYED) < {program.page for program in WRITTEN}
    assert len(RUN) > 10
    assert len(NOTEBOOKS) == 6


def test_no_page_draws_on_the_host_in_a_method_of_a_device() -> None:
    """A generator of an actor stays on the host, and opaque methods have the device as default."""
    texts = {p.page: p.text for p in WRITTEN}
    texts |= {n.name: json.loads(n.read_text("utf-8")).__str__() for n in NOTEBOOKS}
    draws = re.compile(r"torch\.rand\w*\([^\n]*generator=self\.\w+(?![^\n]*device=)")
    assert [page for page, text in texts.items() if draws.search(text)] == []
