"""Tables, sentences and pictures of what `benchmarks/gpu.py` and `llama.py` have recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .bars import Bar, Group, draw
from .figures import RESULTS
from .tables import table

Row = dict[str, Any]

_PAIRS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""What is the same schedule on both sides, as `benchmarks/llama_rows.py` has it."""

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
    points = [
        f"8 bytes on the device: {_times(small['cg captured, device'], small[hand])} by hand "
        f"captured, {_times(small['cg eager, device'], small[hand])} eager: on the device a graph "
        "of so little is slower than its ops one by one. For the host it is faster, "
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
        f"{_times(large['execute, result and wait'], large['by hand, launch and wait'])} by hand; "
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
    ways = (
        "by hand, one graph",
        "cg captured, device",
        "cg eager, device",
        "cg captured, -overlap, device",
        "cg captured, call and wait",
        "cg eager, call and wait",
    )
    found = {row["what"]: (row["value"], date) for date, row in _rows("pipeline")}
    dates = sorted({date for _, date in found.values()})
    rows = []
    for way in ways:
        cells = []
        for size in ("64²", "1024²"):
            value, date = found[f"{size} {way}"]
            ratio = _times(value, found[f"{size} {ways[0]}"][0])
            mark = "" if date == dates[-1] else " (older)"
            cells.append(_micro(value) if way == ways[0] else f"{_micro(value)}, {ratio}{mark}")
        rows.append((way, *cells))
    default, plain = (found[f"1024² cg captured{way}, device"][0] for way in ("", ", -overlap"))
    return (
        f"{table(('µs', '64²', '1024²'), rows)}\n\n"
        f"What is marked as older is of {dates[0]}, the rest of {dates[-1]}. For 1024² the default "
        f"takes {_times(default, plain)} the time of the same step without `overlap`: here "
        "`-overlap` is the better choice, and nothing chooses it for you."
    )


def others() -> str:
    """What else was measured or checked, a line for each run."""
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
    "ahead",
)


def _source(run: Row) -> str:
    return f"`{run['command']}`" if "command" in run else str(run["tool"])


# -- a Llama's pipeline ---------------------------------------------------------------------------


def llama_speed() -> str:
    """Tokens a second and GPU, by schedule, for both sides, and the ratios."""
    eager, fused = _run("eager"), _run("fused")
    rows = []
    for row in _of(eager, "cg"):
        other = _same(fused, row)
        pair = _PAIRS.get(row["schedule"], "")
        cells = [f"{_name(row)}", *_speeds(row), *_speeds(other)]
        if pair:
            of_torch = [_torch(run, pair) for run in (eager, fused)]
            ratios = [
                _times(_tokens(r), _tokens(t)) for r, t in zip((row, other), of_torch, strict=True)
            ]
            cells += [" / ".join(f"{_tokens(each):.0f}" for each in of_torch), *ratios]
        else:
            cells += ["", "", ""]
        rows.append(tuple(cells))
    head = (
        "schedule",
        "cg",
        "MFU",
        "cg fused",
        "MFU",
        "torch (not compiled), in either run",
        "cg / torch",
        "cg fused / torch (not compiled)",
    )
    return f"{table(head, rows)}\n\n{_llama_words()}"


def _llama_words() -> str:
    eager, fused = _run("eager"), _run("fused")
    behind, ahead = [], []
    for schedule, pair in _PAIRS.items():
        ratio = _ratio(eager, schedule, pair)
        (behind if ratio < 1 else ahead).append(f"`{schedule}` {ratio:.2f}x")
    fused_ratios = [_ratio(fused, *pair) for pair in _PAIRS.items()]
    worst = [max(each["value"] for each in run["agree"]) for run in (eager, fused)]
    points = [
        f"Without `fuse`, cg is behind torch in {_list(behind)}, and ahead in {_list(ahead)}. The "
        f"best of cg ({_best_text(eager, 'cg')}) is {_best_ratio(eager):.2f}x the best of torch "
        f"({_best_text(eager, 'torch')}), while torch's own "
        f"figure for that schedule differs by {_spread(_best(eager, 'torch')):.1%} between runs.",
        f"With `fuse` cg is at {min(fused_ratios):.2f}x to {max(fused_ratios):.2f}x torch's same "
        f"schedule, and the best of cg ({_best_text(fused, 'cg')}) at {_best_ratio(fused):.2f}x "
        f"the best of torch ({_best_text(fused, 'torch')}). **Torch's side is not compiled**, so "
        "this says what the option brings and not what cg's schedules bring.",
        "On a small model, losses and gradients of both sides differ by "
        f"{worst[0]:g} without `fuse`, and with it by "
        f"{worst[1]:g} of a gradient's largest element at most, where the benchmark allows 0.06: "
        "bfloat16, and fused kernels round less often.",
        f"Peaks without `fuse`, GiB on the fullest rank, cg and torch: "
        f"{'; '.join(_peaks(eager))}; the best of cg takes "
        f"{max(_best(eager, 'cg')['peak_gib']):.1f}.",
        "8 microbatches and 2 GPUs; 4 were not available. One run each, medians of 5 steps.",
    ]
    return "\n".join(f"- {point}" for point in points)


def llama_sizes() -> str:
    """Tokens a second and GPU with other numbers of microbatches, and ratios to torch."""
    run = _run("sizes")
    sizes = sorted({row["microbatches"] for row in run["rows"]})
    schedules = dict.fromkeys(
        (row["section"], row["schedule"]) for row in run["rows"] if row["side"] == "cg"
    )
    rows = []
    for section, schedule in schedules:
        cells = []
        for size in sizes:
            found = {
                (row["side"], row["section"], row["schedule"]): row
                for row in run["rows"]
                if row["microbatches"] == size
            }
            mine = found.get(("cg", section, schedule))
            other = found.get(("torch", section, _PAIRS.get(schedule, "")))
            cell = f"{_tokens(mine):.0f}" if mine is not None else ""
            if mine is not None and other is not None:
                cell += f", {_times(_tokens(mine), _tokens(other))}"
            cells.append(cell)
        rows.append((_name({"section": section, "schedule": schedule}), *cells))
    best = []
    for size in sizes:
        of = [row for row in run["rows"] if row["microbatches"] == size]
        mine, other = (
            max(_tokens(row) for row in of if row["side"] == side) for side in ("cg", "torch")
        )
        best.append(_times(mine, other))
    rows.append(("best of cg / best of torch", *best))
    return table(("tokens/s/GPU, and by torch's", *(f"m = {size}" for size in sizes)), rows)


def _peaks(run: Row) -> list[str]:
    """Of the schedules that both sides have."""
    return [
        f"`{schedule}` {max(_find(run, 'cg', schedule)['peak_gib']):.1f} and "
        f"{max(_torch(run, pair)['peak_gib']):.1f}"
        for schedule, pair in _PAIRS.items()
    ]


def llama_paper() -> str:
    """What the simulator and the plan foresaw, and what happened."""
    rows, errors, shares = [], [], []
    for run in (_run("eager"), _run("fused")):
        for row in _of(run, "cg"):
            error = row["simulated_ms"] / row["recorded_ms"] - 1
            peak, planned = max(row["peak_gib"]), max(row["planned_gib"])
            errors.append(error)
            shares.append(peak / planned)
            rows.append(
                (
                    f"{_name(row)}{', fused' if run['name'] == 'fused' else ''}",
                    f"{row['simulated_ms']:.1f}",
                    f"{row['recorded_ms']:.1f}",
                    f"{error:+.1%}",
                    f"{row['step_ms']:.1f}",
                    f"{row['simulated_bubble']:.1%}",
                    f"{row['bubble']:.1%}",
                    _both(row["planned_gib"]),
                    _both(row["peak_gib"]),
                )
            )
    head = (
        "schedule",
        "makespan: simulated, ms",
        "recorded, ms",
        "error",
        "a step, ms",
        "bubble: simulated",
        "recorded",
        "planned, GiB by rank",
        "peak, GiB by rank",
    )
    within = sum(abs(error) <= 0.03 for error in errors)
    late, early = (_find(_run("eager"), "cg", name) for name in ("zb-h2", "zb-h1"))
    return (
        f"{table(head, rows)}\n\n"
        f"{within} of {len(errors)} makespans are within 3 %, and the worst is off by "
        f"{max(errors, key=abs):+.1%}. The rank that holds most holds {min(shares):.2f} to "
        f"{max(shares):.2f} times what its plan says.\n\n"
        "A makespan is the longest that one rank takes from its first work to its last. Ranks that "
        "begin and end one after the other add to the step and not to the makespan: "
        f"`zb-h2` has one of {late['recorded_ms']:.1f} ms and `zb-h1` of "
        f"{early['recorded_ms']:.1f}, but a step, which all wait for, takes {late['step_ms']:.1f} "
        f"and {early['step_ms']:.1f} ms."
    )


def llama_before() -> str:
    """What the width of messages in the background changes."""
    names = ("before", "before, narrow", "eager")
    runs = [_run(name) for name in names]
    rows = []
    for row in _of(runs[1], "cg"):
        speeds = [_tokens(_same(run, row)) for run in runs]
        rows.append((_name(row), *(f"{speed:.0f}" for speed in speeds)))
    for pair in ("ScheduleGPipe", "Schedule1F1B"):
        rows.append((f"torch {pair}", *(f"{_tokens(_torch(run, pair)):.0f}" for run in runs)))
    head = ("tokens/s/GPU", "before", "before, all narrow", "now")
    layer = runs[0]["parts_ms"]["layer, forward and backward"]
    gain = _tokens(_find(runs[2], "cg", "1f1b")) / _tokens(_find(runs[0], "cg", "1f1b"))
    return (
        f"{table(head, rows)}\n\n"
        f"From the first column to the last 1F1B gained {gain - 1:.0%}. (A layer alone, forward "
        f"and backward, takes {layer:.2f} ms.)"
    )


def llama_picture() -> str:
    """Bars of tokens a second and GPU, by schedule."""
    eager, fused = _run("eager"), _run("fused")
    groups = []
    for row in _of(eager, "cg"):
        found = [(_tokens(row), "blue"), (_tokens(_same(fused, row)), "green")]
        if pair := _PAIRS.get(row["schedule"]):
            found.append((max(_tokens(_torch(run, pair)) for run in (eager, fused)), "grey"))
        bars = tuple(Bar(value, colour, f"{value:.0f}") for value, colour in found)
        groups.append(Group(_name(row).replace("`", ""), bars))
    return draw(
        "A Llama-shaped pipeline on 2 H200s, 8 microbatches: tokens/s/GPU",
        "longer is better; of torch's two runs the faster; no grey bar: torch has no such schedule",
        groups,
        [
            ("blue", "cg"),
            ("green", 'cg, fuse="inductor"'),
            ("grey", "torch.distributed.pipelining, not compiled"),
        ],
    )


# -- what has been recorded -----------------------------------------------------------------------


def machine() -> str:
    """On what, with which versions, by which commands on which days."""
    recorded = json.loads((RESULTS / "llama.json").read_text(encoding="utf-8"))
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


def _run(name: str) -> Row:
    runs = json.loads((RESULTS / "llama.json").read_text(encoding="utf-8"))["runs"]
    (run,) = [run for run in runs if run["name"] == name]
    return dict(run)


def _of(run: Row, side: str) -> list[Row]:
    return [row for row in run["rows"] if row["side"] == side]


def _find(run: Row, side: str, schedule: str) -> Row:
    (row,) = [row for row in _of(run, side) if row["schedule"] == schedule]
    return row


def _torch(run: Row, schedule: str) -> Row:
    return _find(run, "torch", schedule)


def _same(run: Row, row: Row) -> Row:
    """The row of another run with the same schedule and layout."""
    keys = ("side", "section", "schedule", "microbatches")
    (other,) = [each for each in run["rows"] if all(each[key] == row[key] for key in keys)]
    return dict(other)


def _tokens(row: Row) -> float:
    return float(row["tokens_per_second_per_gpu"])


def _speeds(row: Row) -> tuple[str, str]:
    return f"{_tokens(row):.0f}", f"{row['mfu']:.1%}"


def _ratio(run: Row, schedule: str, pair: str) -> float:
    return _tokens(_find(run, "cg", schedule)) / _tokens(_torch(run, pair))


def _best(run: Row, side: str) -> Row:
    return max(_of(run, side), key=_tokens)


def _spread(row: Row) -> float:
    """By how much a schedule's figures differ between runs with the same settings of torch."""
    runs = [_run(name) for name in ("eager", "fused", "before")]
    found = [_tokens(_same(run, row)) for run in runs]
    return max(found) / min(found) - 1


def _best_ratio(run: Row) -> float:
    return _tokens(_best(run, "cg")) / _tokens(_best(run, "torch"))


def _best_text(run: Row, side: str) -> str:
    row = _best(run, side)
    return f"{_name(row)}, {_tokens(row):.0f}"


def _name(row: Row) -> str:
    """The schedule; a search also says on which layout of stages."""
    layout = {"line": " in a line", "vee": " in a V"}[row["section"]]
    return f"`{row['schedule']}`{layout if row['schedule'] == 'auto' else ''}"


def _both(values: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def _micro(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _times(value: float, other: float) -> str:
    return f"{value / other:.2f}x"


def _list(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
