"""Tables of the benchmarks of groups of ranks, and of one GPU, from what was recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

_RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
_MIB = 2**20


def steps() -> str:
    """Steps on two ranks, beside torch's way over gloo."""
    recorded = _recorded("groups_cpu.json")
    rows = ["| step | cg | peer | peer / cg |", "|---|---|---|---|"]
    for name, sides in sorted(recorded["figures"].items()):
        ours, peer = median(sides["cg"]), median(sides["peer"])
        rows.append(f"| {name} | {ours:.3g} | {peer:.3g} | {peer / ours:.2f}x |")
    return _with_source(rows, recorded)


def all_reduces() -> str:
    """All-reduces on two ranks, beside gloo's."""
    recorded = _recorded("all_reduce.json")
    rows = ["| bytes | cg, µs | gloo, µs | cg / gloo |", "|---|---|---|---|"]
    for size, sides in sorted(recorded["figures"]["all_reduce_us"].items(), key=_bytes):
        ours, peer = median(sides["cg"]), median(sides["gloo"])
        name = f"{int(size) // _MIB} MiB" if int(size) >= _MIB else f"{int(size) // 1024} KiB"
        rows.append(f"| {name} | {ours:.3g} | {peer:.4g} | {ours / peer:.2f}x |")
    return _with_source(rows, recorded)


def on_gpus() -> str:
    """Ratios on two GPUs, and figures of serving, by run."""
    runs = _recorded("groups_gpu.json")["runs"]
    return "\n\n".join(_run(run, _is_shown) for run in runs)


def _is_shown(row: Any) -> bool:
    return row["unit"] == "x" or row["section"] == "serving"


def one_gpu() -> str:
    """Figures of one GPU, by run."""
    return "\n\n".join(_run(run) for run in _recorded("one_gpu.json")["runs"])


def _run(run: Any, wanted: Callable[[Any], bool] = lambda row: True) -> str:
    """The figures of a run that are wanted."""
    rows = [row for row in run["rows"] if wanted(row)]
    lines = [f"| {row['what']} | {_figure(row['value'])} {row['unit']} |" for row in rows]
    machine = run["machine"]
    gpus = ", ".join(f"{count} {name}" for name, count in machine["gpus"].items())
    where = f"{gpus}, driver {machine['driver']}, torch {machine['packages']['torch']}"
    note = f"; {run['note']}" if "note" in run else ""
    table = "\n".join(["| measured | |", "|---|---|", *lines])
    return f"{table}\n\n{run['date']}: `{run['command']}` ({where}{note})"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _bytes(item: tuple[str, Any]) -> int:
    return int(item[0])


def _recorded(name: str) -> Any:
    return json.loads((_RESULTS / name).read_text(encoding="utf-8"))


def _with_source(rows: list[str], recorded: Any) -> str:
    machine = recorded["machine"]
    packages = machine["packages"]
    where = f"{machine['cores']} cores of {machine['cpu']}, torch {packages['torch']}"
    table = "\n".join(rows)
    return f"{table}\n\n{recorded['date']}: `{recorded['command']}` ({where})"
