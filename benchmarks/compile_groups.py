"""Measure the time of all passes for pipelines of groups, up to a thousand ranks.

Run it on an otherwise idle core: `python benchmarks/compile_groups.py [--json FILE]`. The modules
are training steps of `synthetic_groups.py`, of two layers a stage, under 1F1B. A size is
stages x dp x tp x microbatches. One process makes the programs of all ranks, and proves them free
of deadlocks and races; tracing is not part of it.

    python benchmarks/compile_groups.py --sizes 16x8x8x32 --verify

verifies the module after each pass besides, and says how long all took together.
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

from cg.passes import schedules
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline

SIZES = ("4x2x8x32", "8x4x8x32", "16x8x8x32")


@dataclass(frozen=True)
class GroupRow:
    """One size: what `compile_time.py` says of it, and seconds of all, verification included."""

    size: str
    passes: Row
    wall: float


def measure(size: str, schedule: str, verify: bool) -> GroupRow:
    """Compile the step of one size."""
    stages, dp, tp, microbatches = map(int, size.split("x"))
    groups = ((dp, tp),) * stages
    sizes = {"layers": 2, "rows": 2 * dp, "tokens": 16, "width": 64, "hidden": 128}
    module = group_module(GroupSteps(groups, microbatches=microbatches, **sizes))
    pipeline = default_pipeline(schedules.by_name(schedule))
    start = time.perf_counter()
    reports = PassManager(pipeline, verify=verify).run(module)
    wall = time.perf_counter() - start
    return GroupRow(size, summary(schedule, stages * dp * tp, microbatches, reports), wall)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="stages x dp x tp x microbatches")
    parser.add_argument("--schedule", default="1f1b", help="by name (default: 1f1b)")
    parser.add_argument("--verify", action="store_true", help="verify after each pass, too")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    args = parser.parse_args()
    rows = []
    for size in args.sizes:
        rows.append(measure(size, args.schedule, args.verify))
        print(f"{size} done in {rows[-1].wall:.1f} s", file=sys.stderr)
    print(table([row.passes for row in rows]))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
