"""The search of `auto` on random settings: against its bound, known schedules and exact optima.

    python benchmarks/auto_search.py random [--settings 300] [--jobs 2] [--before FILE]
    python benchmarks/auto_search.py optima     # needs pip install ortools
    python benchmarks/auto_search.py times
    python benchmarks/auto_search.py frontier

With --json FILE the rows are written to it, beside what else it has; rows of random settings as
they are found, so what a run that is stopped has found is there.

Random settings: 2 to 32 ranks, 2 to 8 microbatches a rank, times of F, B and W each within half of
equal, transfers up to a tenth of F, one stage a rank or two in a loop or a V. Every third has room
for twice as many microbatches as there are ranks, every third for as many, the others for a number
between. Optima: all pipelines of up to 4 ranks and 6 microbatches whose tasks take 1 or 2, in both
memories, solved by CP-SAT. Times are of the processor.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from random import Random
from time import process_time
from typing import Any

from provenance import provenance

from cg.ir.pipeline.costs import Costs
from cg.ir.pipeline.timing import play
from cg.passes import schedules
from cg.passes.schedules import Pipeline


@dataclass(frozen=True)
class Setting:
    """A pipeline, what its tasks cost, and the memory of its ranks in microbatches."""

    number: int
    ranks: int
    microbatches: int
    chunks: int
    layout: str
    tf: float
    tb: float
    tw: float
    tcomm: float
    memory: int

    @property
    def pipeline(self) -> Pipeline:
        line = tuple(range(self.ranks))
        rest = line[::-1] if self.layout == "vee" else line
        return Pipeline(line + rest * (self.chunks - 1), self.microbatches)

    @property
    def costs(self) -> Costs:
        whole = Costs(self.tf, self.tb, self.tw, self.tcomm)
        return whole.shared(self.pipeline.stage_ranks)


@dataclass(frozen=True)
class Row:
    """The findings for a setting. Times are in milliseconds, but for `search_s`.

    Attributes:
        bound, makespan: no order is under the one; the best found has the other.
        source: what the best comes from.
        peak: of how many microbatches a rank holds the activations at most.
        known, known_makespan: the best of the other schedules that fit, and what it takes.
        before: what the search of an earlier revision takes; None if it was not recorded.
        tried: how many orders the search has tried.
        search_s: seconds of processor time of the search.
    """

    setting: Setting
    bound: float
    makespan: float
    source: str
    peak: float
    known: str | None
    known_makespan: float | None
    before: float | None
    tried: int
    search_s: float

    @property
    def gap(self) -> float:
        return self.makespan / self.bound - 1.0


def random_setting(number: int) -> Setting:
    """The setting with this number: the same everywhere."""
    random = Random(number)
    ranks = random.randint(2, 32)
    microbatches = random.randint(2 * ranks, 8 * ranks)
    tf, tb, tw = (random.uniform(0.5, 1.5) for _ in range(3))
    tcomm = random.uniform(0.0, 0.1) * tf
    between = random.randint(ranks, 2 * ranks)
    chunks, layout = random.choice(((1, "line"), (1, "line"), (2, "loop"), (2, "vee")))
    memory = (2 * ranks, ranks, between)[number % 3]
    return Setting(number, ranks, microbatches, chunks, layout, tf, tb, tw, tcomm, memory)


def search(setting: Setting, before: float | None = None) -> Row:
    """Run the search, and all other schedules, on one setting."""
    pipeline, costs = setting.pipeline, setting.costs
    began = process_time()
    best = schedules.found_orders(schedules.auto(setting.memory, costs), pipeline)[0]
    seconds = process_time() - began
    schedules.validate(pipeline, best.order, "auto")
    found = play(best.order, pipeline.stage_ranks, pipeline.microbatches, costs)
    known: list[tuple[float, str]] = []
    for name in schedules.names():
        if name == "auto":
            continue
        try:
            order = schedules.by_name(name)(pipeline)
        except ValueError:
            continue  # its stages lie in another way
        timeline = play(order, pipeline.stage_ranks, pipeline.microbatches, costs)
        if max(map(timeline.peak, pipeline.ranks)) <= setting.memory + 1e-6:
            known.append((timeline.makespan, name))
    least = min(known, default=None)
    return Row(
        setting,
        best.bound,
        found.makespan,
        best.source,
        max(map(found.peak, pipeline.ranks)),
        least[1] if least else None,
        least[0] if least else None,
        before,
        best.trials,
        round(seconds, 3),
    )


def random_rows(count: int, jobs: int, before: dict[int, float]) -> Iterator[Row]:
    """The rows of all settings, each as soon as it is found."""
    with ProcessPoolExecutor(jobs) as pool:
        rows = [
            pool.submit(search, random_setting(number), before.get(number))
            for number in range(count)
        ]
        for row in as_completed(rows):
            yield row.result()


def summary(rows: Sequence[Row]) -> str:
    """A summary of the rows, a line for each memory."""
    lines = []
    for name, chosen in (
        ("2p", [row for row in rows if row.setting.memory == 2 * row.setting.ranks]),
        ("between", [row for row in rows if 1 < row.setting.memory / row.setting.ranks < 2]),
        ("p", [row for row in rows if row.setting.memory == row.setting.ranks]),
    ):
        gaps = sorted(row.gap for row in chosen)
        if not gaps:
            continue
        worse = sum(
            row.known_makespan is not None and row.makespan > row.known_makespan * (1 + 1e-6)
            for row in chosen
        )
        slower = [row for row in chosen if row.before and row.makespan > row.before * (1 + 1e-6)]
        over = sum(row.peak > row.setting.memory + 1e-6 for row in chosen)
        under = sum(gap <= 0.01 for gap in gaps) / len(gaps)
        lines.append(
            f"memory {name}: {len(gaps)} settings, {under:.0%} at most 1 % above the bound, the "
            f"worst {gaps[-1]:.2%}, median {gaps[len(gaps) // 2]:.2%}; worse than a known "
            f"schedule {worse}, than before {len(slower)}, over the memory {over}"
        )
    return "\n".join(lines)


# -- optima -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimumRow:
    """A small pipeline on a line of ranks: what `auto` finds, and the optimum."""

    ranks: int
    microbatches: int
    tf: int
    tb: int
    tw: int
    tcomm: int
    memory: int
    bound: float
    makespan: float
    optimum: float
    proven: bool


def optimum_rows() -> Iterator[OptimumRow]:
    """All small pipelines: every time of a task is 1 or 2."""
    for p, m in product(range(1, 5), range(1, 7)):
        for tf, tb, tw, tcomm in product((1, 2), (1, 2), (1, 2), (0, 1)):
            if p == 1 and tcomm:
                continue
            for memory in (p, 2 * p):
                pipeline = Pipeline(tuple(range(p)), m)
                schedule = schedules.auto(memory, Costs(tf, tb, tw, tcomm))
                best = schedules.found_orders(schedule, pipeline)[0]
                optimum, proven = best.makespan, True
                if best.makespan > best.bound + 1e-6:
                    optimum, proven = exact(p, m, (tf, tb, tw), tcomm, memory, best.makespan)
                yield OptimumRow(
                    p, m, tf, tb, tw, tcomm, memory, best.bound, best.makespan, optimum, proven
                )


def exact(
    p: int, m: int, times: tuple[int, int, int], tcomm: int, memory: int, upper: float
) -> tuple[float, bool]:
    """The optimum by CP-SAT, and whether it is proven. Each stage runs microbatches in order."""
    from ortools.sat.python import cp_model  # an optional solver, for this comparison alone

    model = cp_model.CpModel()
    tf, tb, tw = times
    horizon = int(upper) + p * (tf + tcomm)
    start = {
        (action, s, i): model.new_int_var(0, horizon, "")
        for action, s, i in product(range(3), range(p), range(m))
    }
    span = model.new_int_var(0, int(upper), "")
    for s, i in product(range(p), range(m)):
        if s:
            model.add(start[0, s, i] >= start[0, s - 1, i] + tf + tcomm)
            model.add(start[1, s - 1, i] >= start[1, s, i] + tb + tcomm)
        model.add(start[1, s, i] >= start[0, s, i] + tf)
        model.add(start[2, s, i] >= start[1, s, i] + tb)
        if i:
            for action, time in enumerate(times):
                model.add(start[action, s, i] >= start[action, s, i - 1] + time)
        if i >= memory:
            model.add(start[0, s, i] >= start[2, s, i - memory] + tw)
    for s in range(p):
        model.add_no_overlap(
            [
                model.new_fixed_size_interval_var(start[action, s, i], times[action], "")
                for action, i in product(range(3), range(m))
            ]
        )
        model.add(span >= start[2, s, m - 1] + tw - s * (tf + tcomm))
    model.minimize(span)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = 30.0
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return solver.best_objective_bound, False
    return solver.objective_value, status == cp_model.OPTIMAL


# -- times and the frontier ---------------------------------------------------------------------

SIZES = ((8, 64), (16, 128), (32, 256), (8, 4096), (1024, 2048))


def time_rows() -> Iterator[dict[str, Any]]:
    """Seconds of processor time of a search, by the size of the pipeline and its layout."""
    for (p, m), layout in product(SIZES, ("line", "vee", "loop")):
        if p * m > 100_000 and layout != "line":
            continue
        chunks = 1 if layout == "line" else 2
        setting = Setting(0, p, m, chunks, layout, 1.1, 0.9, 0.7, 0.05, round(1.5 * p))
        began = process_time()
        schedule = schedules.auto(setting.memory, setting.costs)
        best = schedules.found_orders(schedule, setting.pipeline)[0]
        seconds = process_time() - began
        yield {
            "ranks": p,
            "microbatches": m,
            "layout": layout,
            "search_s": round(seconds, 2),
            "gap": best.gap,
            "tried": best.trials,
            "source": best.source,
        }


def frontier_rows() -> Iterator[dict[str, Any]]:
    """Bubble and memory of every schedule, and of `auto` by memory, in one setting."""
    p, m, times = 8, 32, (1.0, 1.2, 0.8, 0.05)
    line = tuple(range(p))
    layouts = {"line": line, "vee": line + line[::-1], "loop": line + line}
    for layout, stage_ranks in layouts.items():
        pipeline = Pipeline(stage_ranks, m)
        costs = Costs(*times).shared(stage_ranks)

        def row(name: str, order: Any, bound: float | None = None) -> dict[str, Any]:
            timeline = play(order, stage_ranks, m, costs)  # noqa: B023
            work = timeline.busy(0)
            return {
                "schedule": name,
                "layout": layout,  # noqa: B023
                "activations": max(map(timeline.peak, line)),
                "bubble": 1.0 - work / timeline.makespan,
                "bound": None if bound is None else 1.0 - work / bound,
            }

        for name in schedules.names():
            if name == "auto" or (layout != "line" and name in ("gpipe", "1f1b")):
                continue
            if layout == "line" and name in ("interleaved", "looped-bfs"):
                continue
            try:
                yield row(name, schedules.by_name(name)(pipeline))
            except ValueError:
                continue  # its stages lie in another way
        for memory in range(2, 2 * p + 1):
            best = schedules.found_orders(schedules.auto(memory, costs), pipeline)[0]
            yield row("auto", best.order, best.bound)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("random", "optima", "times", "frontier"))
    parser.add_argument("--settings", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--before", type=Path, help="makespans of an earlier revision, by number")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    options = parser.parse_args()
    rows: list[Any] = []
    if options.what == "random":
        known: dict[int, float] = {}
        if options.before:
            read = json.loads(options.before.read_text())
            known = {int(number): makespan for number, makespan in read.items()}
        for row in random_rows(options.settings, options.jobs, known):
            rows.append(row)
            rows.sort(key=lambda row: row.setting.number)
            is_worse = row.before is not None and row.makespan > row.before * (1 + 1e-6)
            worse = ", worse than before" if is_worse else ""
            shown = f"setting {row.setting.number}: {row.gap:.2%}, {row.search_s} s{worse}"
            print(f"{len(rows)} of {options.settings}, {shown}", file=sys.stderr, flush=True)
            if options.json:
                write(options.json, "random", rows)
        print(summary(rows))
        return
    kinds = {"optima": optimum_rows, "times": time_rows, "frontier": frontier_rows}
    for found in kinds[options.what]():
        rows.append(found)
        if options.what != "optima":
            print(found, flush=True)
        if options.json:
            write(options.json, options.what, rows)
    if options.what == "optima":
        equal = sum(row.makespan <= row.optimum + 1e-6 for row in rows)
        unproven = sum(not row.proven for row in rows)
        print(f"{equal} of {len(rows)} are optimal; of {unproven} no optimum is proven")


def write(path: Path, what: str, rows: Sequence[Any]) -> None:
    """Put rows into a file beside what else it has."""
    found = json.loads(path.read_text()) if path.exists() else {}
    found[what] = [row if isinstance(row, dict) else asdict(row) for row in rows]
    found["provenance"] = provenance()
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
