"""An arm of cg: examples/finetune.py as a user starts it, with each step timed.

    python -m cg.launch -n 2 benchmarks/finetuning/cg_arm.py --model DIR ... -- --dp 2 --pp 1

What stands behind `--` goes to the example. Its run does not save, evaluate or sample, and its
optimizer is the one of the other side.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from finetuning import training
from finetuning.meter import Meter
from finetuning.shapes import SHAPES

sys.path.insert(0, str(training.EXAMPLES))

import finetune

import cg


def words(args: argparse.Namespace, out: Path) -> list[str]:
    """What the example is started with."""
    shape = SHAPES[args.shape]
    steps = args.steps + args.profiled
    fixed = {
        "model": args.model,
        "out": out,
        "steps": steps,
        "batch": shape.batch,
        "microbatches": args.microbatches,
        "length": shape.length,
        "windows": training.windows(shape, steps),
        "rate": training.RATE,
        "decay": training.DECAY,
        "clip": training.CLIP,
        "evaluate-every": 0,
        "sample": 0,
    }
    named = [word for name, value in fixed.items() for word in (f"--{name}", str(value))]
    return ["finetune.py", *named, "--bf16", *args.example]


def measured(run: Any, args: argparse.Namespace) -> None:
    """Stands in for the example's `Run.go`."""
    shape, compiled = SHAPES[args.shape], run.train
    batches = [
        run.texts.batch(step, shape.batch, run.args.seed)
        for step in range(args.steps + args.profiled)
    ]
    labels = [finetune.successors(ids) for ids in batches]

    def step(number: int) -> float:
        return float(compiled(batches[number], labels[number])[0])

    Meter(args, cg.rank(), cg.allgather).run(step, lambda: details(compiled))


def details(compiled: Any) -> dict[str, Any]:
    """Facts of a compiled step that explain its times, of rank 0."""
    return {
        "schedule_report": compiled.schedule_report,
        "not_fused": Counter(why for why in compiled.fused.values() if why),
        "uncaptured": {str(graph): why for graph, why in compiled.uncaptured().items()},
    }


def main() -> None:
    parser = training.options(__doc__)
    parser.add_argument("example", nargs="*", help="options of the example, behind --")
    args = parser.parse_args()
    finetune.trainers = training.trainers
    finetune.Run.go = lambda run: measured(run, args)
    finetune.report = lambda *results: None
    with tempfile.TemporaryDirectory() as out:
        sys.argv = words(args, Path(out))
        finetune.main()


if __name__ == "__main__":
    main()
