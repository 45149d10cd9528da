"""Measure the time of all passes for pipelines of groups, up to a thousand ranks.

Run it on an otherwise idle core: `python benchmarks/compile_groups.py [--json FILE]`. The modules
are training steps of `synthetic_groups.py`, of two layers a stage, under 1F1B. A size is
stages x dp x tp x microbatches. One process makes the programs of all ranks, and proves them free
of deadlocks and races; tracing is not part of it.

    python benchmarks/compile_groups.py --sizes 16x8x8x32 --verify

verifies the module after each pass besides, and says how long all took together. With `--experts
128` each block is a mixture of so many experts, spread along the third number of a size, whose rows
are exchanged; `--dispatch gather` lets all rows travel, and `--tasks-in-flight 2` lets them travel
while other tasks compute. `--plan FILE` saves the plan of the last size besides, and says how long
that took, and how long a rank takes to load its part.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from compile_time import Row, summary, table
from synthetic_groups import GroupSteps, group_module

from cg.ir.ops.module import Module
from cg.ir.text.plan_file import PlanFile
from cg.ir.text.printer import format_module
from cg.ir.text.stored_plan import StoredPlan
from cg.ir.verify.verifier import verify_program
from cg.passes import schedules
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline
from cg.passes.placement.choose_dispatch import DISPATCHES

SIZES = ("4x2x8x32", "8x4x8x32", "16x8x8x32")


@dataclass(frozen=True)
class GroupRow:
    """One size: what `compile_time.py` says of it, and seconds of all, verification included."""

    size: str
    passes: Row
    wall: float
    processor: float


def measure(size: str, args: argparse.Namespace) -> GroupRow:
    """Compile the step of one size."""
    stages, dp, tp, microbatches = map(int, size.split("x"))
    groups = ((dp, tp),) * stages
    rows = 2 * dp * (tp if args.experts else 1)
    sizes = {"layers": 2, "rows": rows, "tokens": 16, "width": 64, "hidden": 128}
    steps = GroupSteps(groups, microbatches=microbatches, experts=args.experts, **sizes)
    module = group_module(steps)
    traced = format_module(module)
    dispatch = args.dispatch if args.experts else "auto"
    pipeline = default_pipeline(
        schedules.by_name(args.schedule), dispatch=dispatch, tasks_in_flight=args.tasks_in_flight
    )
    start, began = time.perf_counter(), time.process_time()
    reports = PassManager(pipeline, verify=args.verify).run(module)
    wall, processor = time.perf_counter() - start, time.process_time() - began
    if args.plan is not None:
        print(measure_plan(module, traced, args.plan), file=sys.stderr)
    passes = summary(args.schedule, stages * dp * tp, microbatches, reports)
    return GroupRow(size, passes, wall, processor)


def measure_plan(module: Module, traced: str, file: Path) -> str:
    """Save a plan and load a rank's part; returns the processor times in words."""
    start = time.process_time()
    with file.open("wb") as written:
        written.writelines(PlanFile(module, traced, {}, {}).encoded())
    saved = time.process_time()
    plan = StoredPlan.open(file)
    verify_program(plan.module, plan.module.program_of(module.world // 2))
    loaded = time.process_time()
    return (
        f"plan of {file.stat().st_size / 1e6:.0f} MB: saved in {saved - start:.2f} s of processor, "
        f"a rank's part loaded in {loaded - saved:.2f} s"
    )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="stages x dp x tp x microbatches")
    parser.add_argument("--schedule", default="1f1b", help="by name (default: 1f1b)")
    parser.add_argument(
        "--experts", type=int, default=0, help="of each block, along tp (default: 0)"
    )
    parser.add_argument("--dispatch", default="exchange", choices=DISPATCHES, help="of their rows")
    parser.add_argument("--tasks-in-flight", type=int, default=1, help="of a rank (default: 1)")
    parser.add_argument("--verify", action="store_true", help="verify after each pass, too")
    parser.add_argument("--plan", type=Path, help="save the plan to this file, and load a part")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    args = parser.parse_args()
    rows = []
    for size in args.sizes:
        rows.append(measure(size, args))
        row = rows[-1]
        print(f"{size} in {row.wall:.1f} s, {row.processor:.1f} of processor", file=sys.stderr)
    print(table([row.passes for row in rows]))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
