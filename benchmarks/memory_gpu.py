"""Train on one GPU in less memory, by cg and by torch, arm by arm; a table comes last.

    python benchmarks/memory_gpu.py --only 'layers-*' [--seconds 200] [--json FILE]
    python benchmarks/memory_gpu.py --only 'train-*' [--seconds 200] [--json FILE]
    python benchmarks/memory_gpu.py --shape tiny --device fake --steps 2      # a trial

Each arm is a process of its own (`memory_arms.py`). An arm that fails is a row with its error and
its last phase, and the others go on. No arm is begun that would not end in `--seconds`. FILE has
all rows so far, those that failed with the end of their output: where Python was at a timeout.

Arms `layers-*` compute four layers of Llama-7B, forward and backward, on 8 x 2,048 tokens in
bfloat16. Each layer is an actor, so tensors of one can rest on the host while another computes.

- keep: cg without a limit
- memory: `compile(memory=)` with a share of the planned peak of keep (`--share 0.6`)
- offload: the two products that a layer's gate takes are marked by `cg.offload`
- torch: `torch.compile` of the four layers
- budget-0.6 and others: the same with `torch._functorch.config.activation_memory_budget`; the one
  to compare is the largest whose peak is at most that of memory

Arms `train-*` train 3.4e9 parameters by AdamW in float32, with products in bfloat16, on one text of
24,576 tokens. Weights, gradients and AdamW's state take 50 GiB, and activations 123 GiB more.

- keep: cg without a limit; it is out of memory on 141 GB
- recompute: `compile(memory="64GiB", passes="-offload")`
- memory: `compile(memory="64GiB")`
- host: the same, and what AdamW keeps, 25 GiB, rests on the host by `store="host"`
- torch: plain torch, with `torch.utils.checkpoint` around each layer

The columns: `ms` is the median of the steps behind those that warm up, on the host's clock; a step
ends with a wait for the device. `peak` is what torch's allocator holds at most in a step, without
what is there between steps: weights, gradients of `layers`, AdamW's state; `planned` is what cg has
planned, and `host` its pinned memory. Losses of the arms are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from finetuning.processes import run
from provenance import provenance

ARMS = (
    "layers-keep",
    "layers-memory",
    "layers-torch",
    "layers-budget-0.6",
    "layers-budget-0.4",
    "layers-offload",
    "train-memory",
    "train-recompute",
    "train-host",
    "train-torch",
    "train-keep",
)
GUESS = 40.0
"""Seconds that an arm is expected to take, before one of its kind has run."""
MARGIN = 8.0
"""Seconds to end an arm, and to print the table."""
TOLERANCE = 0.02
"""The share by which the losses of arms may differ: they round to bfloat16 at other places."""

PHASE = "phase: "
"""The beginning of a line in the output of an arm that says which phase begins."""

Row = dict[str, Any]


@dataclass
class Bench:
    """The arms that have run, and the time that is left.

    Attributes:
        folder: for logs and results, removed at the end.
    """

    args: argparse.Namespace
    folder: Path
    began: float = field(default_factory=time.monotonic)
    rows: list[Row] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Seconds."""
        return float(self.args.seconds) - MARGIN - (time.monotonic() - self.began)

    def expected(self, arm: str) -> float:
        """Seconds that an arm takes: as much as the longest of its kind so far."""
        kind = arm.partition("-")[0]
        return max((r["seconds"] for r in self.rows if r["arm"].startswith(kind)), default=GUESS)

    def run(self, arm: str, turn: int) -> Row:
        """Run an arm, if there is time for it."""
        row: Row = {"arm": arm, "turn": turn, "seconds": 0.0}
        if self.expected(arm) > self.left:
            return {**row, "status": "skipped", "error": "no time was left for it"}
        args, stem = self.args, f"{arm}.{turn}"
        result, log = self.folder / f"{stem}.json", self.folder / f"{stem}.log"
        options = ["--steps", args.steps, "--shape", args.shape, "--device", args.device]
        options += ["--share", args.share, "--fuse", args.fuse]
        script = Path(__file__).with_name("memory_arms.py")
        command = [sys.executable, str(script), arm, str(result), *map(str, options)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "CG_CACHE": ""}
        variables["CG_DEVICE"] = "auto" if args.device == "cuda" else args.device
        began = time.monotonic()
        error = run(command, variables, log, min(args.timeout, self.left))
        row["seconds"] = round(time.monotonic() - began, 1)
        if not error and not result.exists():
            error = "it has written no result"
        if error:
            output = log.read_text(errors="replace")
            status = "out of memory" if "out of memory" in output else "failed"
            phases = [line for line in output.splitlines() if line.startswith(PHASE)]
            error = "; ".join((error, *phases[-1:]))
            return {**row, "status": status, "error": error, "output": output[-8000:]}
        return {**row, "status": "ok", **json.loads(result.read_text())}

    def write(self) -> None:
        """All rows so far: a run that is cut short has left something."""
        if self.args.json is not None:
            options = {name: str(value) for name, value in vars(self.args).items()}
            record = {**provenance(), "options": options, "rows": self.rows}
            self.args.json.write_text(json.dumps(record, indent=1) + "\n")


def jobs(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """All that is to run, in order: arms take turns."""
    for turn in range(args.turns):
        for arm in ARMS:
            if any(fnmatchcase(arm, pattern) for pattern in args.only):
                yield arm, turn


def table(rows: Sequence[Row]) -> str:
    """A line for each arm: medians, where it had several turns."""
    lines = [f"{'arm':20} {'ms':>10} {'peak GB':>9} {'planned':>9} {'host':>8}  loss"]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        turns = [row for row in rows if row["arm"] == arm]
        ended = [row for row in turns if row["status"] == "ok"]
        if ended:
            middle = statistics.median(ms for row in ended for ms in row["ms"])
            sizes = [
                _gigabytes([row[name] for row in ended if row.get(name) is not None])
                for name in ("peak", "planned", "host")
            ]
            figures = f"{middle:>10.3f} {sizes[0]:>9} {sizes[1]:>9} {sizes[2]:>8}"
            lines.append(f"{arm:20} {figures}  {ended[0]['losses'][-1]:.5f}")
        lines += [f"{arm:20} {row['status']}: {row['error']}" for row in turns if "error" in row]
    return "\n".join(lines)


def _gigabytes(sizes: Sequence[int]) -> str:
    return f"{statistics.median(sizes) / 1e9:.3f}" if sizes else "-"


def disagreements(rows: Sequence[Row]) -> list[str]:
    """The arms whose losses are not those of the first arm of their kind, in words."""
    first: dict[str, Row] = {}
    wrong = []
    for row in rows:
        if row["status"] != "ok":
            continue
        other = first.setdefault(row["arm"].partition("-")[0], row)
        pairs = zip(row["losses"], other["losses"], strict=True)
        if not all(abs(mine - its) <= TOLERANCE * abs(its) for mine, its in pairs):
            wrong.append(f"{row['arm']} has the losses {row['losses']}, not {other['losses']}")
    return wrong


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", default=["*"], metavar="NAME", help="arms, with * and ?")
    add("--list", action="store_true", help="name the arms, and end")
    add("--turns", type=int, default=1, help="how often all arms run")
    add("--steps", type=int, default=12, help="timed steps of layers; training takes a third")
    add("--share", type=float, default=0.6, help="of the planned peak of keep, for the arm memory")
    add("--shape", choices=["large", "tiny"], default="large")
    add("--device", choices=["cuda", "fake", "cpu"], default="cuda")
    add("--fuse", choices=["inductor", "none"], default="inductor", help="of layers, by cg")
    add("--seconds", type=float, default=200.0, help="for the whole run")
    add("--timeout", type=float, default=120.0, help="seconds for an arm")
    add("--json", type=Path, metavar="FILE", help="with a row for each arm")
    args = parser.parse_args(words)
    for pattern in args.only:
        if not any(fnmatchcase(arm, pattern) for arm in ARMS):
            parser.error(f"--only: no arm is named {pattern}; there are {', '.join(ARMS)}")
    return args


def main(words: Sequence[str] | None = None) -> int:
    """Run the arms; 1 if one has failed, or their losses differ."""
    args = parse(words)
    if args.list:
        print("\n".join(arm for arm, _ in jobs(args)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        for arm, turn in jobs(args):
            row = bench.run(arm, turn)
            bench.rows.append(row)
            bench.write()
            print(f"{arm}: {row['status']}, {row['seconds']} s", flush=True)
    print(table(bench.rows))
    wrong = disagreements(bench.rows)
    print("\n".join(wrong) or "the losses of all arms agree")
    return int(bool(wrong) or any(row["status"] == "failed" for row in bench.rows))


if __name__ == "__main__":
    sys.exit(main())
