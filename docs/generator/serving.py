"""Tables of the server's benchmarks, from what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .tables import table

_RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
_FIGURES = {
    "output_tokens_per_second": "tokens/s",
    "ttft p50": "TTFT, median",
    "itl p50": "ITL, median",
    "itl p99": "ITL, 99 %",
    "cpu_ms_per_token": "CPU per token",
}
_ON = {
    "front": "Switches of the front, on a server whose engine costs nothing",
    "engine": "All others, on a tiny Qwen2 on two ranks",
}


def ablation() -> str:
    """What each switch is worth: ratios to the base, with their intervals."""
    recorded = _recorded("serving_ablation.json")
    if recorded is None:
        return "Not recorded yet."
    parts = [
        f"{title}:\n\n{_switches(recorded['figures'][name], 'inf')}"
        for name, title in _ON.items()
        if recorded["figures"][name]
    ]
    return "\n\n".join([*parts, _source(recorded)])


def ablation_nano() -> str:
    """The same on a GPU, by run."""
    recorded = _recorded("serving_ablation_nano.json")
    if recorded is None:
        return "Not recorded yet."
    parts = [f"{run['title']}:\n\n{_switches(run['figures'], 'nano')}" for run in recorded["runs"]]
    gpus = ", ".join(f"{count} {name}" for name, count in recorded["machine"]["gpus"].items())
    return "\n\n".join([*parts, f"{_source(recorded)}, {gpus}"])


def _switches(figures: dict[str, Any], load: str) -> str:
    """A row for each switch.

    Args:
        load: of the clients, as its figures name it.
    """
    rows = []
    for arm, each in sorted(figures.items()):
        cells = [_cell(each["ratios"].get(f"online {load}: {key}")) for key in _FIGURES]
        if each["problems"]:
            cells = ["refused: " + "; ".join(each["problems"]), *[""] * (len(_FIGURES) - 1)]
        rows.append([f"`{arm}`", str(each["rounds"]), *cells])
    return table(["", "rounds", *_FIGURES.values()], rows)


def _cell(figure: Any) -> str:
    """A ratio and its interval; without an effect the interval alone."""
    if figure is None:
        return ""
    interval = f"{figure['low']:.2f} to {figure['high']:.2f}"
    return f"**{figure['ratio']:.2f}**, {interval}" if figure["effect"] else interval


def slow_link() -> str:
    """Decoding over a slow link: each arm, measured and predicted."""
    recorded = _recorded("slow_link.json")
    if recorded is None:
        return "Not recorded yet."
    rows = [
        [
            each["arm"],
            str(each["groups"]),
            *(
                f"{each[name]:.{digits}f}, {each[f'predicted_{name}']:.{digits}f}"
                for name, digits in (("ttft_ms", 1), ("itl_ms", 1), ("tokens_per_second", 0))
            ),
        ]
        for each in recorded["figures"]["rows"]
    ]
    head = ["", "groups", "TTFT in ms, predicted", "ITL in ms, predicted", "tokens/s, predicted"]
    return f"{table(head, rows)}\n\n{_source(recorded)}"


def _recorded(name: str) -> Any:
    file = _RESULTS / name
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def _source(recorded: Any) -> str:
    machine = recorded["machine"]
    where = f"{machine['cores']} cores of {machine['cpu']}, torch {machine['packages']['torch']}"
    return f"{recorded['date']}: `{recorded['command']}` ({where})"
