"""Measure how long it takes to order, check and simulate a schedule, by its size.

    python benchmarks/simulator.py [--schedule 1f1b] [--sizes 8x64,64x256,1024x4096] [--json FILE]

One stage on each rank; seconds of processor time, and the most memory that the process has held so
far. The sizes are stages x microbatches.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time

from cg.ir.pipeline.costs import Costs
from cg.passes import schedules
from cg.passes.schedules import Pipeline, validate
from cg.passes.simulate.schedule_simulator import simulate

SIZES = "8x64,64x256,256x1024,1024x4096"
COSTS = Costs(tf=1.0, tb=1.0, tw=1.0, tcomm=0.05)


@dataclass(frozen=True)
class Row:
    """One size: how many tasks, seconds for each part, what came out."""

    schedule: str
    stages: int
    microbatches: int
    tasks: int
    order_s: float
    validate_s: float
    simulate_s: float
    microseconds_per_task: float
    peak_rss_mb: float
    bubble_ratio: float


def measure(name: str, stages: int, microbatches: int) -> Row:
    pipeline = Pipeline(tuple(range(stages)), microbatches)
    schedule = schedules.by_name(name)
    began = process_time()
    order = schedule.order(pipeline, **dict(schedule.options))
    ordered = process_time()
    validate(pipeline, order, name)
    checked = process_time()
    found = simulate(order, pipeline.stage_ranks, microbatches, COSTS)
    done = process_time()
    tasks = sum(map(len, order.values()))
    return Row(
        name,
        stages,
        microbatches,
        tasks,
        round(ordered - began, 3),
        round(checked - ordered, 3),
        round(done - checked, 3),
        round((done - began) / tasks * 1e6, 3),
        round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        round(found.bubble_ratio, 4),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--schedule", default="1f1b", choices=schedules.names())
    parser.add_argument("--sizes", default=SIZES, help=f"default: {SIZES}")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    options = parser.parse_args()
    sizes = [tuple(map(int, size.split("x"))) for size in options.sizes.split(",")]
    rows = [asdict(measure(options.schedule, *size)) for size in sizes]
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(str(value).rjust(len(name)) for name, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
