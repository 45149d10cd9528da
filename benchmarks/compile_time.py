"""Measure the time of all passes, and count the ops that they make, for growing pipelines.

Run it on an otherwise idle core: `python benchmarks/compile_time.py [--json FILE]`. The modules are
training steps of `synthetic.py`, compiled by the default pipeline; tracing is not part of it.

    python benchmarks/compile_time.py --schedule all --sizes 8x64 64x256

takes every schedule, on stages that lie as it wants them: two on each rank for those that go round
the ranks, or down and up again. The sizes are ranks x microbatches.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from synthetic import pipeline_module

from cg.ir.ops.module import Module
from cg.passes import schedules
from cg.passes.base import Pipeline
from cg.passes.manager.manager import PassManager, PassReport
from cg.passes.manager.pipelines import default_pipeline

RANKS = (4, 16, 64)
MICROBATCHES = (16, 64, 256)
LOOPS = ("interleaved", "looped-bfs")
VEES = ("zb-v", "dualpipe-v")


@dataclass(frozen=True)
class Row:
    """One size: seconds in all and by pass, and the number of ops of all programs at the end."""

    schedule: str
    ranks: int
    microbatches: int
    seconds: float
    ops: int
    passes: dict[str, float]


def traced(schedule: str, ranks: int, microbatches: int) -> tuple[Module, Pipeline]:
    """A training step as it is traced, and the passes that compile it."""
    module = pipeline_module(ranks, microbatches, layout(schedule, ranks))
    return module, default_pipeline(schedules.by_name(schedule))


def measure(schedule: str, ranks: int, microbatches: int, repeats: int, verify: bool) -> Row:
    """The fastest of `repeats` compilations."""
    rows = []
    for _ in range(repeats):
        module, pipeline = traced(schedule, ranks, microbatches)
        reports = PassManager(pipeline, verify=verify).run(module)
        rows.append(summary(schedule, ranks, microbatches, reports))
    return min(rows, key=lambda row: row.seconds)


def layout(schedule: str, ranks: int) -> list[int]:
    """The rank of each stage."""
    line = list(range(ranks))
    if schedule in VEES:
        return line + line[::-1]
    return line * 2 if schedule in LOOPS else line


def summary(schedule: str, ranks: int, microbatches: int, reports: list[PassReport]) -> Row:
    """Add up the reports; a pass that runs twice counts with both runs."""
    passes: dict[str, float] = {}
    for report in reports:
        passes[report.name] = passes.get(report.name, 0.0) + report.seconds
    seconds = sum(report.seconds for report in reports)
    return Row(schedule, ranks, microbatches, seconds, reports[-1].ops, passes)


def table(rows: list[Row]) -> str:
    """One line for each size, then the passes of the slowest."""
    lines = [
        f"{'schedule':<12} {'ranks':>6} {'microbatches':>13} {'ops':>9} {'seconds':>9} "
        f"{'us per op':>10}"
    ]
    lines += [
        f"{row.schedule:<12} {row.ranks:>6} {row.microbatches:>13} {row.ops:>9} "
        f"{row.seconds:>9.3f} {row.seconds / row.ops * 1e6:>10.1f}"
        for row in rows
    ]
    largest = max(rows, key=lambda row: row.seconds)
    lines.append(
        f"\nby pass, for {largest.schedule} on {largest.ranks} ranks with "
        f"{largest.microbatches} microbatches:"
    )
    by_time = sorted(largest.passes.items(), key=lambda item: -item[1])
    lines += [f"{seconds:>9.3f} s  {name}" for name, seconds in by_time]
    return "\n".join(lines)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--schedule", nargs="+", default=["1f1b"], help="by name, or all (default: 1f1b)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--microbatches", type=int, nargs="+", default=MICROBATCHES)
    parser.add_argument("--sizes", nargs="+", help="pairs such as 8x64, instead of all of both")
    parser.add_argument("--repeats", type=int, default=1, help="take the fastest of so many")
    parser.add_argument("--verify", action="store_true", help="verify after each pass, untimed")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    args = parser.parse_args()
    names = schedules.names() if args.schedule == ["all"] else args.schedule
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes or ()]
    rows = []
    for name in names:
        for ranks, microbatches in sizes or product(args.ranks, args.microbatches):
            rows.append(measure(name, ranks, microbatches, args.repeats, args.verify))
            print(f"{name}, {ranks} ranks, {microbatches} microbatches done", file=sys.stderr)
    print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
