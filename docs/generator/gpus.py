"""Tables, sentences and a picture of what `benchmarks/gpu.py` has recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from . import llama
from .bars import Bar, Group, draw
from .figures import RESULTS
from .tables import table

Row = dict[str, Any]

_SIZES = ("8 B", "40 MB")
_AIM = 60.0
"""Microseconds that `execute(x).result()` was to take for 8 bytes."""


# -- round trips ----------------------------------------------------------------------------------


def round_trips() -> str:
    """Times of round trips, by hand and by cg, and those measured earlier of others."""
    rows = [
        (what, *(_micro(_found(section, f"{size} {what}")) for size in _SIZES))
        for section, what in _WAYS
    ]
    earlier = [
        (f"{what}, earlier", *(f"{_earlier(f'{size} {what}'):g}" for size in _SIZES))
        for what in _OTHERS
    ]
    return f"{table(('µs', *_SIZES), rows + earlier)}\n\n{_round_trip_words()}"


_WAYS = (
    ("round_trip", "by hand, device"),
    ("round_trip", "cg captured, device"),
    ("round_trip", "cg eager, device"),
    ("round_trip", "by hand, launch and wait"),
    ("round_trip", "cg captured, call and wait"),
    ("round_trip", "cg eager, call and wait"),
    ("driven", "execute, result"),
    ("driven", "execute, result and wait"),
    ("driven", "execute, 8 in flight, each"),
)
_OTHERS = ("torch.distributed (NCCL)", "Ray Compiled Graph, static shape, direct return")


def _round_trip_words() -> str:
    small = {what: _found(section, f"8 B {what}") for section, what in _WAYS}
    large = {what: _found(section, f"40 MB {what}") for section, what in _WAYS}
    ray = [_earlier(f"{size} {_OTHERS[1]}") for size in _SIZES]
    both = [each["execute, result and wait"] for each in (small, large)]
    host = _found("host", "a step, nobody waiting for the device")
    hand = "by hand, device"
    hand_large = _found("driven", "40 MB by hand, launch and wait")
    points = [
        f"8 bytes on the device: {_times(small['cg captured, device'], small[hand])} by hand "
        f"captured, {_times(small['cg eager, device'], small[hand])} eager. For the host a graph "
        "is faster, "
        f"{small['cg captured, call and wait']:.0f} against "
        f"{small['cg eager, call and wait']:.0f} µs with the wait.",
        f"40 MB on the device: {_times(large['cg captured, device'], large[hand])} captured, "
        f"{_times(large['cg eager, device'], large[hand])} eager.",
        f"A call of a step for 8 bytes, with the wait for it, takes "
        f"{_times(small['cg captured, call and wait'], small['by hand, launch and wait'])} by "
        f"hand. Without the wait a step takes the host {host:.0f} µs.",
        f"`execute(x).result()` takes {small['execute, result']:.0f} µs for 8 bytes, and "
        f"{small['execute, result and wait']:.0f} with the wait for the device; the aim was "
        f"{_AIM:.0f}{', and is missed' if small['execute, result'] > _AIM else ''}. With 8 in "
        f"flight each takes {small['execute, 8 in flight, each']:.0f} µs, the wait included.",
        f"Of 40 MB the device sets the pace: {large['execute, result and wait']:.0f} µs with the "
        "wait, "
        f"{_times(large['execute, result and wait'], hand_large)} by hand; "
        f"in a loop that does not wait {large['execute, result']:.0f}, since a graph is launched "
        "again when its last replay has ended.",
        f"Against Ray Compiled Graph's earlier figures, {ray[0]:.0f} and {ray[1]:.0f} µs, "
        f"`execute(x).result()` with the wait is {ray[0] / both[0]:.1f} and "
        f"{ray[1] / both[1]:.1f} times as fast. The two were not measured on one day.",
    ]
    return "\n".join(f"- {point}" for point in points)


def round_trip_picture() -> str:
    """Bars of round trips as the host sees them, each size on a scale of its own."""
    shown = [way for way in _WAYS if "wait" in way[1]]
    groups = []
    for size in _SIZES:
        groups.append(Group(size))
        for section, what in shown:
            value = _found(section, f"{size} {what}")
            groups.append(_one(what, value, "grey" if "by hand" in what else "blue"))
        for what, colour in zip(_OTHERS, ("grey", "orange"), strict=True):
            name = what.partition(",")[0].partition(" (")[0]
            groups.append(_one(f"{name}, earlier", _earlier(f"{size} {what}"), colour))
    return draw(
        "Round trips between two H200s, with the wait for the device, µs",
        "shorter is better; each size has a scale of its own; earlier: measured on another day",
        groups,
        [("grey", "NCCL, by hand or by torch"), ("blue", "cg"), ("orange", "Ray Compiled Graph")],
    )


def _one(label: str, value: float, colour: str) -> Group:
    return Group(label, (Bar(value, colour, f"{value:.0f}"),))


# -- small pipelines, and four GPUs ---------------------------------------------------------------


def pipelines() -> str:
    """Eight microbatches of two matrices, in µs and as ratios to the same by hand."""
    found = {row["what"]: row["value"] for _, row in _rows("pipeline")}
    rows = []
    for way in _PIPELINE_WAYS:
        cells = []
        for size in _PIPELINE_SIZES:
            hand = found[f"{size} by hand, one graph, {way.rpartition(', ')[2]}"]
            value = found[f"{size} {way}"]
            cells.append(
                f"{_micro(value)}, {_times(value, hand)}" if value != hand else _micro(value)
            )
        rows.append((way, *cells))
    late = [
        _times(found[f"{size} cg captured, device"], found[f"{size} cg captured, -overlap, device"])
        for size in _PIPELINE_SIZES
    ]
    captured, eager, hand = (
        found[f"64² {way}, call and wait"] for way in ("cg captured", "cg eager", "by hand, eager")
    )
    slow, slow_eager, slow_hand = (
        _found("slower host", f"64² {way}, call and wait")
        for way in ("cg captured", "cg eager", "by hand, eager")
    )
    return (
        f"{table(('µs', *_PIPELINE_SIZES), rows)}\n\n"
        "Captured, the step of 64² with the wait for it is "
        f"{eager / captured:.1f} times as fast as cg without graphs, and {hand / captured:.1f} "
        f"times as fast as the same by hand without a graph. How much a graph saves is a matter of "
        f"the host: {slow_eager / slow:.1f} and {slow_hand / slow:.1f} times on a slower one, see "
        "the last table. With `overlap` these take "
        f"{', '.join(late)} the time without it: a message takes as long as a product here, so "
        "there is hardly anything for it to hide behind."
    )


_PIPELINE_SIZES = ("64²", "1024²", "1024² TF32", "1024² bf16")
_PIPELINE_WAYS = (
    "by hand, one graph, device",
    "cg captured, device",
    "cg captured, -overlap, device",
    "by hand, eager, device",
    "cg eager, device",
    "by hand, one graph, call and wait",
    "cg captured, call and wait",
    "by hand, eager, call and wait",
    "cg eager, call and wait",
)


def others() -> str:
    """Further measurements and checks, a line for each run."""
    rows = []
    for run in _gpu()["runs"]:
        found = [row for row in run["rows"] if row["section"] in _OTHER_SECTIONS]
        values = [f"{row['what']}: {row['value']:.4g} {row['unit']}".strip() for row in found]
        if values:
            words = "; ".join(values) + (f" ({run['note']})" if "note" in run else "")
            rows.append((run["date"], str(run.get("gpus", "")), _source(run), words))
    return table(("date", "GPUs", "how", "found"), rows)


_OTHER_SECTIONS = (
    "overlap",
    "memory",
    "profile",
    "equality",
    "failure",
    "sanitizer",
    "random",
    "wheel",
    "faster host",
    "slower host",
    "widths",
    "ahead",
)


def _source(run: Row) -> str:
    return f"`{run['command']}`" if "command" in run else str(run["tool"])


# -- what has been recorded -----------------------------------------------------------------------


def machine() -> str:
    """On what, with which versions, by which commands on which days."""
    recorded = llama.recorded()
    of, runs = recorded["machine"], recorded["runs"]
    packages = ", ".join(f"{name} {version}" for name, version in of["packages"].items())
    commands = [run for run in [*_gpu()["runs"], *runs] if "command" in run]
    commands.sort(key=lambda run: str(run["date"]))
    lines = "\n".join(dict.fromkeys(map(_command, commands)))
    return (
        f"{of['accelerators']}; 2 of one host with {of['cores']} cores unless a line says "
        f"otherwise; driver {of['driver']}, Python {of['python']}, {packages}. Measured by\n\n"
        f"{lines}\n\nAll rows, with their commands, are in `benchmarks/results/gpu.json` and "
        "`llama.json`."
    )


def _command(run: Row) -> str:
    gpus = f", {run['gpus']} GPUs" if run.get("gpus", 2) != 2 else ""
    what = f": {run['what']}" if "what" in run else ""
    return f"- {run['date']}{gpus}: `{run['command']}`{what}"


def _gpu() -> Row:
    return dict(json.loads((RESULTS / "gpu.json").read_text(encoding="utf-8")))


def _rows(section: str) -> Iterator[tuple[str, Row]]:
    """The rows of a section with their dates."""
    for run in _gpu()["runs"]:
        for row in run["rows"]:
            if row["section"] == section:
                yield run["date"], row


def _found(section: str, what: str) -> float:
    (value,) = [row["value"] for _, row in _rows(section) if row["what"] == what]
    return float(value)


def _earlier(what: str) -> float:
    (value,) = [row["value"] for row in _gpu()["earlier"]["rows"] if row["what"] == what]
    return float(value)


def _micro(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _times(value: float, other: float) -> str:
    return f"{value / other:.2f}x"
