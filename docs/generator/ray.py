"""The measurements in `docs/guide/from-ray.md`: cg beside Ray and MPI, and a long run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .tables import table

_RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
_ROWS = {
    "round trip 1 B": "round trip, 1 byte",
    "scatter-gather 1 B": "scatter-gather, 1 byte",
    "chain 1 B": "chain, 1 byte",
    "round trip 1 B asyncio": "round trip, 1 byte, asyncio",
    "scatter-gather 1 B asyncio": "scatter-gather, 1 byte, asyncio",
    "chain 1 B asyncio": "chain, 1 byte, asyncio",
    "round trip 1 MiB numpy": "round trip, array of 1 MiB",
    "round trip 10 MiB numpy": "round trip, array of 10 MiB",
    "round trip 1 MiB tensor": "round trip, tensor of 1 MiB",
    "round trip 10 MiB tensor": "round trip, tensor of 10 MiB",
}
_RAY, _MPI = "ray compiled", "mpi4py"
_ARMS = ("cg", "cg bound", "cg source")  # compiled, compiled with bound ranks, not compiled

Medians = Mapping[str, Mapping[str, Mapping[str, float]]]


def times() -> str:
    """The time of a call on each side, and the ratios of these."""
    medians = _medians()
    head = ("", "Ray Compiled Graphs", "cg, compiled wheel", "times faster", "bound to cores")
    rest = ("times faster", "cg, from source", "raw mpi4py", "cg's time by mpi4py's: wheel, bound")
    rows = [_times_of(medians, name, words) for name, words in _ROWS.items()]
    rows += [
        _single(medians, "an idle actor, share of a core", "idle_share", "{:.1%}"),
        _single(medians, "the first execution after 3 s, chain", "wake_us", "{:.0f}"),
    ]
    return table((*head, *rest), rows)


def at_all_times() -> str:
    """The same ratios of the medians of all times, quiet or not."""
    faster = _read("ray_comparison")["figures"]["times_faster"]
    ratios = (f"{_ROWS[name]}: {_ratio(faster[f'{name}, all times'][_RAY])}" for name in _ROWS)
    return "; ".join(ratios) + "."


def throughput() -> str:
    """Executions per second, by how many are in flight."""
    medians = _medians()
    head = ("executions per second", "Ray Compiled Graphs", "cg, compiled wheel", "bound to cores")
    rows = [
        (f"{name}: 1, 4, 16 in flight", *(_rates(medians[arm], name) for arm in (_RAY, *_ARMS)))
        for name in ("round trip", "chain")
    ]
    return table((*head, "cg, from source"), rows)


def soak() -> str:
    """The results of a long run of random executions."""
    run = _read("soak")
    growth, own, in_use = (run[f"{name}_kib_per_minute"] for name in ("rss", "own", "in_use"))
    return (
        f"`{run['command']}` ({run['machine']}): {run['executions']:,} executions, "
        f"{run['errors']:,} of them with an error, and {run['dropped']:,} results dropped. Every "
        "value and every error was the right one, and all graphs closed. In the second half the "
        f"memory of the ranks grew by {_list(growth)} KiB a minute, what is not shared of it by "
        f"{_list(own)}, and of that what malloc has given out and not got back by {_list(in_use)}; "
        f"at the end they held {_list(run['rss_mib'])} MiB."
    )


def _list(values: Sequence[float]) -> str:
    *first, last = (f"{value:.0f}" for value in values)
    return f"{', '.join(first)} and {last}"


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _medians() -> Medians:
    medians: Medians = _read("ray_comparison")["figures"]["medians"]
    return medians


def _times_of(medians: Medians, name: str, words: str) -> tuple[str, ...]:
    took = {arm: row[name]["p50_us"] for arm, row in medians.items() if name in row}
    shown = {arm: _microseconds(time, "MiB" in name) for arm, time in took.items()}
    ray, (wheel, bound, source) = took[_RAY], _ARMS
    by_mpi = [f"{took[arm] / took[_MPI]:.2f}" for arm in (wheel, bound)] if _MPI in took else []
    return (
        words,
        shown[_RAY],
        shown[wheel],
        _ratio(ray / took[wheel]),
        shown[bound],
        _ratio(ray / took[bound]),
        shown[source],
        shown.get(_MPI, ""),
        ", ".join(by_mpi),
    )


def _single(medians: Medians, words: str, key: str, form: str) -> tuple[str, ...]:
    """A row of what has no ratios."""
    ray, wheel, bound, source = (
        form.format(medians[arm]["chain idle"][key]).replace("%", " %") for arm in (_RAY, *_ARMS)
    )
    return (words, ray, wheel, "", bound, "", source, "", "")


def _rates(arm: Mapping[str, Mapping[str, float]], name: str) -> str:
    rates = (arm[f"{name} 1 B, {count} in flight"]["per_second"] for count in (1, 4, 16))
    return ", ".join(f"{round(rate, -2):.0f}" for rate in rates)


def _microseconds(time: float, is_large: bool) -> str:
    return f"{time:.0f}" if is_large or time >= 100 else f"{time:.1f}"


def _ratio(times: float) -> str:
    return f"{times:.0f}" if times >= 10 else f"{times:.1f}"
