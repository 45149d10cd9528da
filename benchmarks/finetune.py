"""Fine-tune SmolLM2-135M on 2 CPU ranks: tokens a second, against two peers, in turns.

    python benchmarks/finetune.py [--model DIR] [--turns 3] [--json FILE] [--small] [--only SIDE …]

Sides, each in processes of its own, with as many threads in all as there are ranks: the step of
examples/finetune.py in a pipeline, as it is and with --fuse inductor; plain transformers in one
process, with the whole batch at once and in the same microbatches; torch.distributed.pipelining
over Gloo (1F1B) on the same parts. All train in float32 by AdamW with clipped gradients, on equal
random tokens from the same weights, and their losses are compared. Two steps are left out, and
medians are given of the rest.

Without --model the weights are random, of SmolLM2's shape; examples/demo_model.py writes its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from finetune_arms import write_random

ARMS = Path(__file__).resolve().parent / "finetune_arms.py"
SIDES = ("cg", "cg, fused", "plain, whole batch", "plain, microbatches", "torch pipelining")
TIMEOUT = 1800.0
"""Seconds for one side's turn."""
AGREES = 1e-4
"""By how much losses may differ: the sums are ordered otherwise, and errors grow over the steps."""


def turn(side: str, args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """One run of a side."""
    arm, ranks, threads, microbatches = {
        "cg": ("cg", args.ranks, 1, args.microbatches),
        "cg, fused": ("cg", args.ranks, 1, args.microbatches),
        "plain, whole batch": ("plain", 1, args.ranks, 1),
        "plain, microbatches": ("plain", 1, args.ranks, args.microbatches),
        "torch pipelining": ("pipelining", args.ranks, 1, args.microbatches),
    }[side]
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "cg.launch", "-n", str(ranks)]
    given = ["--model", model, "--batch", args.batch, "--length", args.length]
    given += ["--microbatches", microbatches, "--steps", args.steps, "--threads", threads]
    given += ["--schedule", args.schedule]
    given += ["--stages", *args.stages] if args.stages else []
    given += ["--fuse", "inductor"] if side == "cg, fused" else []
    command = [*start, str(ARMS), arm, *map(str, given)]
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads), "CG_RANKS": "1"}
    if ranks > 1:
        del variables["CG_RANKS"]
    done = subprocess.run(
        command, env=variables, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT, check=True
    )
    line = next(line for line in done.stdout.splitlines() if '"tokens_per_second"' in line)
    found: dict[str, Any] = json.loads(line[line.index("{") :])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, help="a folder; without it weights are random")
    add("--small", action="store_true", help="a small model, to try everything out")
    add("--ranks", type=int, default=2)
    add("--turns", type=int, default=3)
    add("--steps", type=int, default=5)
    add("--batch", type=int, default=16)
    add("--length", type=int, default=256)
    add("--microbatches", type=int, default=8)
    add("--schedule", default="zb-h1", help="of cg")
    add("--stages", type=int, nargs="*", default=[], help="layers of each stage")
    add("--only", nargs="*", default=list(SIDES), choices=SIDES, help="sides, the first compared")
    add("--json", type=Path)
    args = parser.parse_args()
    sides = args.only
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder) / "model"
        if args.model is None:
            write_random(model, args.small)
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for _ in range(args.turns):
            for side in sides:
                runs[side].append(turn(side, args, model))
    speeds = {s: statistics.median(r["tokens_per_second"] for r in runs[s]) for s in sides}
    wanted = runs[sides[0]][0]["losses"]
    for side in sides:
        for run in runs[side]:
            worst = max(abs(a - b) for a, b in zip(run["losses"], wanted, strict=True))
            assert worst < AGREES, f"losses of {side} differ by {worst}: {run['losses']}, {wanted}"
    print(f"{'side':22} tokens/s   {sides[0]} is so many times as fast")
    for side in sides:
        print(f"{side:22} {speeds[side]:8.0f}   {speeds[sides[0]] / speeds[side]:.2f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"tokens_per_second": speeds, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
