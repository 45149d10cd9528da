"""Fine-tune Qwen2.5's shapes on two GPUs by cg and by plain torch, arm by arm; a table comes last.

    python benchmarks/finetune_gpu.py [--shapes 0.5B 3B] [--only 'cg-dp*' torch-ddp ...]
        [--steps 14] [--turns 1] [--seconds 540] [--timeout 180] [--record FILE] [--models DIR]

Each arm is a job of its own on two ranks, started by `python -m cg.launch` or by torchrun. An arm
that fails is a row with its error, and the others go on. `--list` names all arms in their order;
`--shapes tiny` tries everything out on CPUs, over gloo. With `--seconds` no arm is begun that would
not end in time; the same command with `--resume` goes on behind the arms that FILE has.

All arms train the same random weights on the same tokens: 16 sequences of 1,024 tokens a step, in
bfloat16 with weights in float32, by AdamW in one kernel, gradients clipped. cg's arms are
examples/finetune.py as a user starts it. The columns:

tokens/s  of a whole step on both GPUs, the median of steady steps, each as long as on the slowest
          rank; the first `--warm` steps do not count
MFU       operations of the model, 6 N + 12 L W T a token (`finetuning/shapes.py`), by the cards'
          dense bfloat16 peak
peak GiB  torch.cuda.max_memory_allocated of each rank
NCCL ms   milliseconds a step in which NCCL's kernels run on a rank, by torch's profiler in two
          further steps; exposed: of these, those in which no other kernel runs, and their share
first s   seconds from the start of the arm's command to the end of its first step; the cache of
          TorchInductor is empty then, and cg has none, but with `--warm-cache`
losses    of the first and of the last step; they must be those of the first arm
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from finetuning.arms import ARMS, RANKS, Arm, matching
from finetuning.processes import run
from finetuning.rows import Row, derived, disagreements, table
from finetuning.shapes import SHAPES
from provenance import provenance

ROOT = Path(__file__).resolve().parent.parent
GUESS = 40.0
"""Seconds that an arm is expected to take, before one like it has run."""
MARGIN = 5.0
"""Seconds to end a job, and to print the table."""


@dataclass
class Bench:
    """The arms that have run, and the time that is left.

    Attributes:
        folder: for models, logs and caches, removed at the end.
    """

    args: argparse.Namespace
    folder: Path
    began: float = field(default_factory=time.monotonic)
    rows: list[Row] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.args.seconds - MARGIN - (time.monotonic() - self.began)

    def model(self, shape: str) -> Path:
        """The folder of a model, written when it is first asked for."""
        folder: Path = (self.args.models or self.folder) / shape
        if not (folder / "tokenizer.json").exists():
            script = Path(__file__).with_name("finetuning") / "shapes.py"
            command = [sys.executable, str(script), str(folder), "--shape", shape]
            subprocess.run(command, check=True, env=variables(shape), timeout=self.args.timeout)
        return folder

    def expected(self, arm: Arm, shape: str) -> float:
        """Seconds that an arm takes: as much as the longest one like it so far."""
        alike = [
            row["seconds"]
            for row in self.rows
            if row["shape"] == shape
            and "seconds" in row
            and (ARMS[row["arm"]].side, ARMS[row["arm"]].compiles) == (arm.side, arm.compiles)
        ]
        return max(alike, default=GUESS)

    def run(self, arm: Arm, shape: str, turn: int) -> Row:
        """Run an arm, if there is time for it."""
        row: Row = {"shape": shape, "arm": arm.name, "turn": turn}
        if self.expected(arm, shape) > self.left:
            return {**row, "status": "skipped", "error": "no time was left for it"}
        stem = f"{shape}.{arm.name}.{turn}"
        result, log = self.folder / f"{stem}.json", self.folder / f"{stem}.log"
        command = arm.command(self.measured(arm, shape, result))
        more = {"CG_PASSES": arm.passes} if arm.passes else {}
        if not self.args.warm_cache:
            more |= {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / f"{stem}.cache")}
            more |= {"CG_CACHE": ""}
        words = [word.removeprefix(f"{ROOT}/") for word in command[1:]]
        row |= {"command": shlex.join(["python", *words]), "passes": arm.passes}
        limit = min(self.args.timeout, self.left)
        began = time.monotonic()
        error = run(command, {**variables(shape), **more}, log, limit)
        row["seconds"] = round(time.monotonic() - began, 1)
        if not error and not result.exists():
            error = "it has written no result"
        if error:
            ending = log.read_text(errors="replace")[-8000:]
            return {**row, "status": "failed", "error": error, "output": ending}
        measured = json.loads(result.read_text())
        return {
            **row,
            "status": "ok",
            **measured,
            **derived(measured, shape, self.args.warm, RANKS),
        }

    def measured(self, arm: Arm, shape: str, result: Path) -> list[str]:
        """The options that all arms take."""
        of_pipelines = SHAPES[shape].pipeline_microbatches
        values = {
            "model": self.model(shape),
            "shape": shape,
            "microbatches": of_pipelines if arm.is_pipeline else self.microbatches(shape),
            "steps": self.args.steps,
            "warm": self.args.warm,
            "profiled": self.args.profiled,
            "result": result,
            "began": time.time(),
        }
        return [word for name, value in values.items() for word in (f"--{name}", str(value))]

    def microbatches(self, shape: str) -> int:
        return self.args.microbatches or SHAPES[shape].microbatches

    def write(self) -> None:
        """All rows so far: a run that is cut short has left something."""
        if self.args.record is not None:
            nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
            origin = {**provenance(), "variables": nccl}
            self.args.record.write_text(json.dumps({**origin, "rows": self.rows}, indent=1) + "\n")


def variables(shape: str) -> dict[str, str]:
    """The environment of jobs, with the same share of the cores for the ranks of both sides."""
    cores = max(1, len(os.sched_getaffinity(0)) // RANKS)
    settings = {"OMP_NUM_THREADS": str(cores), "TOKENIZERS_PARALLELISM": "false"}
    if shape == "tiny":
        settings |= {"CG_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **settings}


def recorded(args: argparse.Namespace) -> list[Row]:
    """With `--resume`, the rows of arms that have ended well in an earlier run."""
    if not args.resume or not args.record.exists():
        return []
    return [row for row in json.loads(args.record.read_text())["rows"] if row["status"] == "ok"]


def jobs(args: argparse.Namespace) -> Iterator[tuple[Arm, str, int]]:
    """All that is to run, in order: arms take turns."""
    for turn in range(args.turns):
        for shape in args.shapes:
            for arm in matching(args.only):
                yield arm, shape, turn


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shapes", nargs="+", choices=sorted(SHAPES), default=["0.5B"])
    add("--only", nargs="+", default=[], metavar="NAME", help="arms, with * and ? (default: all)")
    add("--list", action="store_true", help="name the arms, and end")
    add("--steps", type=int, default=14, help="timed steps of an arm")
    add("--warm", type=int, default=5, help="of these, the first that do not count")
    add("--profiled", type=int, default=2, help="further steps, in torch's profiler; 0: none")
    add("--turns", type=int, default=1, help="how often all arms run")
    add("--microbatches", type=int, help="of a step, but for pipelines (default: the shape's)")
    add("--seconds", type=float, default=float("inf"), help="for the whole run")
    add("--timeout", type=float, default=180.0, help="seconds for an arm")
    add("--warm-cache", action="store_true", help="leave TorchInductor's cache as it is")
    add("--models", type=Path, help="where models are kept for the next run")
    add("--record", type=Path, metavar="FILE", help="JSON with a row for each arm")
    add("--resume", action="store_true", help="keep what FILE has, and run the other arms")
    args = parser.parse_args()
    if not 0 <= args.warm < args.steps:
        parser.error(f"--warm {args.warm} leaves none of the --steps {args.steps}")
    if args.resume and args.record is None:
        parser.error("--resume goes on from the file of --record, which is not named")
    try:
        matching(args.only)
    except ValueError as error:
        parser.error(f"--only: {error}")
    return args


def main() -> None:
    args = parse()
    if args.list:
        print("\n".join(arm.name for arm in matching(args.only)))
        return
    signal.signal(signal.SIGTERM, lambda *caught: sys.exit("ended by SIGTERM"))  # and its job, too
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder), rows=recorded(args))
        done = {(row["arm"], row["shape"], row["turn"]) for row in bench.rows}
        for arm, shape, turn in jobs(args):
            if (arm.name, shape, turn) in done:
                continue
            row = bench.run(arm, shape, turn)
            bench.rows.append(row)
            bench.write()
            outcome = row.get("tokens_per_second", row.get("error"))
            print(f"{shape} {arm.name}: {row['status']}, {outcome}", flush=True)
    print(table(bench.rows))
    wrong = disagreements(bench.rows)
    print("\n".join(wrong) or "all losses are those of the first arm")
    if wrong or any(row["status"] == "failed" for row in bench.rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
