"""Tables, sentences and a picture of what `benchmarks/llama.py` has recorded.

A run is called by its name in `benchmarks/results/llama.json`.
"""

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
    "interleaved": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "auto (loop)": "ScheduleInterleavedZeroBubble",
}
"""Names of the same schedule on both sides, as `benchmarks/llama_rows.py` has it."""

_LAYOUTS = {"line": " in a line", "vee": " in a V", "loop": " in loops"}

_FOUR = "four", "four, fused"
_SIZES = "four, sizes", "four, fused, sizes"
_TWO = "eager", "fused"
"""The runs without and with fused kernels, on so many GPUs."""


def speed() -> str:
    """Tokens a second and GPU on 4 GPUs, by schedule, for both sides, and the ratios."""
    return f"{_speeds(*_FOUR)}\n\n{_words(*_FOUR)}\n{_more_words()}"


def speed_of_two() -> str:
    """The same on 2 GPUs."""
    return f"{_speeds(*_TWO)}\n\n{_words(*_TWO)}"


def _speeds(plain_name: str, fused_name: str) -> str:
    plain, fused = _run(plain_name), _run(fused_name)
    rows = []
    for row in _of(plain, "cg"):
        other = _same(fused, row)
        cells = [_name(row), *_speed(row), *_speed(other)]
        pairs = [(mine, _pair(run, mine)) for run, mine in ((plain, row), (fused, other))]
        if all(right is not None for _, right in pairs):
            cells.append(" / ".join(f"{_tokens(right):.0f}" for _, right in pairs if right))
            cells += [_times(_tokens(mine), _tokens(right)) for mine, right in pairs if right]
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
    return table(head, rows)


def _words(plain_name: str, fused_name: str) -> str:
    plain, fused = _run(plain_name), _run(fused_name)
    ratios = dict(_ratios(plain))
    behind = [f"{name} {ratio:.2f}x" for name, ratio in ratios.items() if ratio < 1]
    ahead = [f"{name} {ratio:.2f}x" for name, ratio in ratios.items() if ratio >= 1]
    fused_ratios = [ratio for _, ratio in _ratios(fused)]
    worst = [max(each["value"] for each in run["agree"]) for run in (plain, fused)]
    slower = f"behind torch in {_list(behind)}, and ahead in" if behind else "ahead of torch in"
    points = [
        f"Without `fuse`, cg is {slower} {_list(ahead)}. The "
        f"best of cg ({_best_text(plain, 'cg')}) is {_best_ratio(plain):.2f}x the best of torch "
        f"({_best_text(plain, 'torch')}).",
        f"With `fuse` cg is at {min(fused_ratios):.2f}x to {max(fused_ratios):.2f}x torch's same "
        f"schedule, and the best of cg ({_best_text(fused, 'cg')}) at {_best_ratio(fused):.2f}x "
        f"the best of torch ({_best_text(fused, 'torch')}). **Torch's side is not compiled**, so "
        "this says what the option brings and not what cg's schedules bring.",
        "On a small model, losses and gradients of both sides differ by "
        f"{worst[0]:g} without `fuse`, and with it by "
        f"{worst[1]:g} of a gradient's largest element at most, where the benchmark allows 0.06: "
        "bfloat16, and fused kernels round less often.",
        f"Peaks without `fuse`, GiB on the fullest rank, cg and torch: "
        f"{'; '.join(_peaks(plain))}; the best of cg takes "
        f"{max(_best(plain, 'cg')['peak_gib']):.1f}.",
    ]
    return "\n".join(f"- {point}" for point in points)


def _more_words() -> str:
    both, plain = _run("four, both compiled"), _run("four")
    ratios = [f"{name} {ratio:.2f}x" for name, ratio in _ratios(both)]
    parts = plain["parts_ms"]
    cuts = [each["value"] for each in plain["cuts"]]
    assert cuts[::2] == cuts[1::2], "the cut by cost is another"
    points = [
        "With both sides compiled, for the schedules of torch that take compiled layers: "
        f"{_list(ratios)}.",
        f"A layer takes {parts['layer, forward and backward']:.2f} ms, the head "
        f"{parts['head, forward and backward']:.2f} and the embedding "
        f"{parts['embedding, forward and backward']:.2f}, forward and backward. To cut 16 layers "
        "by these costs gives the even cut in each layout, so there is no other to show.",
        "One run each, medians of 3 steps.",
    ]
    return "\n".join(f"- {point}" for point in points)


def sizes() -> str:
    """With other numbers of microbatches, on 4 GPUs, without and with fused kernels."""
    plain, fused = (_sizes(name) for name in _SIZES)
    return f"Without `fuse`:\n\n{plain}\n\nWith `fuse`, torch not compiled:\n\n{fused}"


def sizes_of_two() -> str:
    """The same on 2 GPUs."""
    return _sizes("sizes")


def _sizes(name: str) -> str:
    """Tokens a second and GPU with other numbers of microbatches, and ratios to torch."""
    run = _run(name)
    found = sorted({row["microbatches"] for row in run["rows"]})
    of = {size: [row for row in run["rows"] if row["microbatches"] == size] for size in found}
    keys = dict.fromkeys((row["section"], row["schedule"]) for row in _of(run, "cg"))
    rows = []
    for section, schedule in keys:
        cells = []
        for size in found:
            mine = [
                row
                for row in of[size]
                if (row["side"], row["section"], row["schedule"]) == ("cg", section, schedule)
            ]
            other = _pair({"rows": of[size]}, mine[0]) if mine else None
            cell = f"{_tokens(mine[0]):.0f}" if mine else ""
            if other is not None:
                cell += f", {_times(_tokens(mine[0]), _tokens(other))}"
            cells.append(cell)
        rows.append((_name({"section": section, "schedule": schedule}), *cells))
    best = [
        _times(*(max(_tokens(row) for row in of[size] if row["side"] == s) for s in _SIDES))
        for size in found
    ]
    rows.append(("best of cg / best of torch", *best))
    return table(("tokens/s/GPU, and by torch's", *(f"m = {size}" for size in found)), rows)


_SIDES = ("cg", "torch")


def paper() -> str:
    """The forecast of the simulator and the plan, and what happened."""
    rows, errors, shares, others, points, parts = [], [], [], [], [], []
    for name in _FOUR:
        for row in _of(_run(name), "cg"):
            error = _error(row)
            errors.append(error)
            points.append(_points(row))
            parts.append(abs(row["simulated_bubble"] / row["bubble"] - 1))
            if abs(error) > 0.05:
                others.append((name, row["schedule"]))
            shares.append(max(row["peak_gib"]) / max(row["planned_gib"]))
            rows.append(
                (
                    f"{_name(row)}{', fused' if name == _FOUR[1] else ''}",
                    f"{row['simulated_ms']:.1f}",
                    f"{row['recorded_ms']:.1f}",
                    f"{error:+.1%}",
                    f"{row['step_ms']:.1f}",
                    f"{row['simulated_bubble']:.1%}",
                    f"{row['bubble']:.1%}",
                    _all(row["planned_gib"]),
                    _all(row["peak_gib"]),
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
    assert not others, "the words below are of none that are further off"
    late, early = (_find(_run("four"), "cg", name) for name in ("zb-h2", "zb-h1"))
    return (
        f"{table(head, rows)}\n\n"
        f"All {len(errors)} makespans are within 5 %, the worst of them off by "
        f"{max(errors, key=abs):+.1%}. Bubbles are off by {max(points):.1f} points of the makespan "
        f"at most, which is {max(parts):.0%} of the smaller ones; messages were still timed with "
        "all multiprocessors then. Costs are those of four executions without the longest and the "
        "shortest. "
        f"The rank that holds most holds {min(shares):.2f} to {max(shares):.2f} times what its "
        "plan says.\n\n"
        "A makespan is the longest that one rank takes from its first work to its last. Ranks that "
        "begin and end one after the other add to the step and not to the makespan: "
        f"`zb-h2` has one of {late['recorded_ms']:.1f} ms and `zb-h1` of "
        f"{early['recorded_ms']:.1f}, but a step, which all wait for, takes {late['step_ms']:.1f} "
        f"and {early['step_ms']:.1f} ms."
    )


def paper_of_sizes() -> str:
    """By how much simulated makespans are off with other numbers of microbatches."""
    found: dict[str, dict[tuple[int, int], float]] = {}
    for column, name in enumerate(_SIZES):
        for row in _of(_run(name), "cg"):
            found.setdefault(_name(row), {})[row["microbatches"], column] = _error(row)
    keys = sorted({key for errors in found.values() for key in errors})
    rows = [
        (name, *(f"{errors[key]:+.1%}" if key in errors else "" for key in keys))
        for name, errors in found.items()
    ]
    head = ("makespan, error", *(f"m = {m}{', fused' if column else ''}" for m, column in keys))
    every = [error for errors in found.values() for error in errors.values()]
    near = sum(abs(error) <= 0.05 for error in every)
    again = list(_of(_run("two, paper"), "cg"))
    return (
        f"{table(head, rows)}\n\n{near} of {len(every)} are within 5 %, the worst is off by "
        f"{max(every, key=abs):+.1%}. Costs were those of the first schedule with m = 4, also for "
        "16, and those of a call of its own for 32; and messages were timed with all "
        "multiprocessors. Both have changed since: costs are measured with each number of "
        "microbatches, for with fewer a GPU idles more and its clocks are faster, and a message "
        "that is received in the background is timed with as few multiprocessors as it has in the "
        f"step. With that all {len(again)} makespans with 4, 8 and 16 that were measured again, on "
        f"2 GPUs, are off by {max(map(_error, again), key=abs):+.1%} at most, and their bubbles by "
        f"{max(map(_points, again)):.1f} points. This has not been repeated on 4."
    )


def _error(row: Row) -> float:
    """Of the simulated makespan."""
    return float(row["simulated_ms"] / row["recorded_ms"] - 1)


def _points(row: Row) -> float:
    """By how much the simulated bubble is off, in hundredths of the makespan."""
    return 100 * abs(float(row["simulated_bubble"] - row["bubble"]))


def before() -> str:
    """The effect of the width of messages in the background."""
    names = ("before", "before, narrow", "eager")
    runs = [_run(name) for name in names]
    rows = []
    for row in _of(runs[1], "cg"):
        speeds = [_tokens(_same(run, row)) for run in runs]
        rows.append((_name(row), *(f"{speed:.0f}" for speed in speeds)))
    for pair in ("ScheduleGPipe", "Schedule1F1B"):
        found = [_find(run, "torch", pair) for run in runs]
        rows.append((f"torch {pair}", *(f"{_tokens(row):.0f}" for row in found)))
    head = ("tokens/s/GPU", "before", "before, all narrow", "behind it")
    layer = runs[0]["parts_ms"]["layer, forward and backward"]
    gain = _tokens(_find(runs[2], "cg", "1f1b")) / _tokens(_find(runs[0], "cg", "1f1b"))
    return (
        f"{table(head, rows)}\n\n"
        f"From the first column to the last 1F1B gained {gain - 1:.0%}. (A layer alone, forward "
        f"and backward, takes {layer:.2f} ms.)"
    )


def picture() -> str:
    """Bars of tokens a second and GPU, by schedule."""
    plain, fused = map(_run, _FOUR)
    groups = []
    for row in _of(plain, "cg"):
        other = _same(fused, row)
        found = [(_tokens(row), "blue"), (_tokens(other), "green")]
        of_torch = [right for right in (_pair(plain, row), _pair(fused, other)) if right]
        if of_torch:
            found.append((max(map(_tokens, of_torch)), "grey"))
        bars = tuple(Bar(value, colour, f"{value:.0f}") for value, colour in found)
        groups.append(Group(_name(row).replace("`", ""), bars))
    return draw(
        "A Llama-shaped pipeline on 4 H200s, 8 microbatches: tokens/s/GPU",
        "longer is better; of torch's two runs the faster; no grey bar: torch has no such schedule",
        groups,
        [
            ("blue", "cg"),
            ("green", 'cg, fuse="inductor"'),
            ("grey", "torch.distributed.pipelining, not compiled"),
        ],
    )


# -- what has been recorded -----------------------------------------------------------------------


def recorded() -> Row:
    """All of it."""
    return dict(json.loads((RESULTS / "llama.json").read_text(encoding="utf-8")))


def _run(name: str) -> Row:
    (run,) = [run for run in recorded()["runs"] if run["name"] == name]
    return dict(run)


def _of(run: Row, side: str) -> list[Row]:
    return [row for row in run["rows"] if row["side"] == side]


def _find(run: Row, side: str, schedule: str) -> Row:
    (row,) = [row for row in _of(run, side) if row["schedule"] == schedule]
    return row


def _pair(run: Row, row: Row) -> Row | None:
    """Torch's row of the same schedule, if torch has it and it was run."""
    of_torch = [each for each in _of(run, "torch") if each["section"] == row["section"]]
    found = [each for each in of_torch if each["schedule"] == _PAIRS.get(row["schedule"])]
    return found[0] if found else None


def _same(run: Row, row: Row) -> Row:
    """The row of another run with the same schedule and layout."""
    keys = ("side", "section", "schedule", "microbatches")
    (other,) = [each for each in run["rows"] if all(each[key] == row[key] for key in keys)]
    return dict(other)


def _ratios(run: Row) -> Iterator[tuple[str, float]]:
    """By how much cg's side is faster, of the schedules that both sides have."""
    for row in _of(run, "cg"):
        right = _pair(run, row)
        if right is not None:
            yield _name(row), _tokens(row) / _tokens(right)


def _peaks(run: Row) -> Iterator[str]:
    """Of the schedules that both sides have."""
    for row in _of(run, "cg"):
        right = _pair(run, row)
        if right is not None:
            yield f"{_name(row)} {max(row['peak_gib']):.1f} and {max(right['peak_gib']):.1f}"


def _tokens(row: Row) -> float:
    return float(row["tokens_per_second_per_gpu"])


def _speed(row: Row) -> tuple[str, str]:
    return f"{_tokens(row):.0f}", f"{row['mfu']:.1%}"


def _best(run: Row, side: str) -> Row:
    return max(_of(run, side), key=_tokens)


def _best_ratio(run: Row) -> float:
    return _tokens(_best(run, "cg")) / _tokens(_best(run, "torch"))


def _best_text(run: Row, side: str) -> str:
    row = _best(run, side)
    return f"{_name(row)}, {_tokens(row):.0f}"


def _name(row: Row) -> str:
    """The schedule; a search also says on which layout of stages."""
    name, _, _ = row["schedule"].partition(" (")
    return f"`{name}`{_LAYOUTS[row['section']] if name == 'auto' else ''}"


def _all(values: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def _times(value: float, other: float) -> str:
    return f"{value / other:.2f}x"


def _list(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
