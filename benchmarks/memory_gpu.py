"""Four layers of Llama-7B on one GPU in less memory, by cg and by torch: peaks and times, in turns.

    python benchmarks/memory_gpu.py [--turns 3] [--steps 20] [--json FILE]
    python benchmarks/memory_gpu.py --shape tiny --device cpu --turns 1 --steps 2      # a trial

A step is the forward and the backward of 8 x 2,048 tokens in bfloat16, with the gradients of all
weights, which add up. Each layer is an actor of its own, so tensors of one can rest on the host
while another computes. Arms:

- keep: cg without a limit
- memory: `compile(memory=)` with a share of the planned peak of keep (`--share 0.6`)
- offload: the two products that a layer's gate takes are marked by `cg.offload`
- torch: `torch.compile` of the four layers
- budget: the same with `torch._functorch.config.activation_memory_budget`, the largest one of
  `--budgets` whose peak is at most that of the arm memory

Each arm is a process of its own. `peak` is what torch's allocator holds at most in a step, without
weights and gradients; `planned` is what cg has planned. A time is the median of the steps of all
turns, on the host's clock, behind steps that warm up; a step ends with a wait for the device. The
losses are compared. On hosts nothing is offloaded, peaks are planned, and the smallest budget is
taken.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from llama_model import LLAMA, Layer, Part, Shape, rotated
from provenance import provenance
from torch import Tensor, nn

ARMS = ("keep", "memory", "offload", "torch", "budget")
LAYERS, WARM = 4, 6
SHAPES = {
    "llama-7b": (replace(LLAMA, layers=LAYERS + 2), 8),
    "tiny": (Shape(layers=LAYERS + 2, width=64, heads=2, hidden=160, sequence=32), 2),
}
"""Shapes, and the sequences of a step. There are layers around the four, which are not made."""


class OffloadedLayer(Layer):
    """A layer whose largest saved tensors rest on the host."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        import cg

        batch, sequence, _ = x.shape
        normed = self.norm1(x)
        q, k, v = (
            linear(normed).view(batch, sequence, self.heads, -1).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        q, k = q * cos + rotated(q) * sin, k * cos + rotated(k) * sin
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        gate, up = cg.offload(self.gate(normed)), cg.offload(self.up(normed))
        return x + self.down(F.silu(gate) * up)


class OneLayer(Part):
    """One of the four layers, with or without marks."""

    def __init__(self, shape: Shape, number: int, device: str, marks: bool = False) -> None:
        super().__init__(shape, range(number + 1, number + 2), device)
        if marks:
            for layer in self.layers.values():
                layer.__class__ = OffloadedLayer


def loss_of(y: Tensor) -> Tensor:
    return y.float().square().mean()


def inputs_of(shape: Shape, sequences: int, device: str) -> Tensor:
    """Activations of the layer before, [sequences, tokens, width]."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sequences, shape.sequence, shape.width, generator=generator)
    return x.to(device, torch.bfloat16)


def cg_step(args: argparse.Namespace) -> tuple[Callable[[], float], nn.Module, dict[str, Any]]:
    """A step, the layers, and what is planned."""
    import cg

    shape, sequences = SHAPES[args.shape]
    actor = cg.actor(OneLayer).on(0)
    layers = [actor(shape, i, args.device, args.arm == "offload") for i in range(LAYERS)]

    @cg.trace
    def train(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer.forward(x)
        loss = loss_of(x)
        cg.backward(loss)
        return loss

    x = inputs_of(shape, sequences, args.device)
    lowered = train.lower(x)
    fuse = None if args.fuse == "none" else args.fuse
    options: dict[str, Any] = {"fuse": fuse}
    if args.device == "cpu":
        options["passes"] = "-offload"
    if args.arm == "memory":
        plain = lowered.compile(**options)
        options["memory"] = int(args.share * plain.memory_analysis()[0].peak)
        plain.close()
    step = lowered.compile(**options)
    plan = step.memory_analysis()[0]
    facts = {
        "planned": plan.peak,
        "host": plan.host,
        "moved": plan.moved,
        "report": step.memory_report,
    }
    return lambda: float(step(x)), nn.ModuleList(layer.local for layer in layers), facts


def torch_step(args: argparse.Namespace) -> tuple[Callable[[], float], nn.Module, dict[str, Any]]:
    """A step, and the layers."""
    import torch._functorch.config

    shape, sequences = SHAPES[args.shape]
    layers = nn.Sequential(*(OneLayer(shape, i, args.device) for i in range(LAYERS)))
    x = inputs_of(shape, sequences, args.device)
    if args.arm == "budget":
        torch._functorch.config.activation_memory_budget = args.budget
    compiled = torch.compile(layers)

    def step() -> float:
        loss = loss_of(compiled(x))
        loss.backward()
        return float(loss.detach())

    return step, layers, {}


def run_arm(args: argparse.Namespace) -> None:
    """Print the times of an arm, its peak and its loss."""
    torch.set_num_threads(1)
    make = torch_step if args.arm in ("torch", "budget") else cg_step
    step, layers, facts = make(args)
    is_on_gpu = args.device == "cuda"
    times, peaks, loss = [], [], 0.0
    for number in range(WARM + args.steps):
        if is_on_gpu and number != 1:  # the first has no gradients yet
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        loss = step()
        times.append((time.perf_counter() - began) * 1e3)
        if is_on_gpu and number >= 1:
            peaks.append(torch.cuda.max_memory_allocated())
    resting = sum(2 * p.nbytes for p in layers.parameters())
    resting += sum(b.nbytes for b in layers.buffers())
    # A graph that is replayed takes nothing: its memory was taken when it was captured.
    peak = max(peaks, default=0) - resting if is_on_gpu else facts.get("planned")
    print(
        json.dumps(
            {
                "arm": args.arm,
                "budget": args.budget if args.arm == "budget" else None,
                "ms": [round(t, 3) for t in times[WARM:]],
                "peak": peak,
                "loss": loss,
                **facts,
            }
        ),
        flush=True,
    )


def turn(arm: str, args: argparse.Namespace, budget: float = 1.0) -> dict[str, Any]:
    """An arm in a process of its own."""
    options = ["--steps", args.steps, "--shape", args.shape, "--device", args.device]
    options += ["--share", args.share, "--fuse", args.fuse, "--arm", arm, "--budget", budget]
    done = subprocess.run(
        [sys.executable, __file__, *map(str, options)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def choose_budget(args: argparse.Namespace, most: int | None) -> tuple[float, list[dict[str, Any]]]:
    """The largest budget whose peak is at most that of cg, and what was tried."""
    tried = []
    budgets = sorted(args.budgets, reverse=True)
    for budget in budgets[-1:] if most is None or args.device == "cpu" else budgets:
        result = turn("budget", args, budget)
        tried.append(result)
        if most is None or result["peak"] is None or result["peak"] <= most:
            break
    return tried[-1]["budget"], tried


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--turns", type=int, default=3)
    add("--steps", type=int, default=20)
    add("--share", type=float, default=0.6, help="of the planned peak of keep, for the arm memory")
    add("--shape", choices=SHAPES, default="llama-7b")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--fuse", choices=["inductor", "none"], default="inductor", help="of the arms of cg")
    add(
        "--budgets",
        type=float,
        nargs="+",
        default=[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1],
        help="that the arm budget may choose of",
    )
    add("--json", type=Path)
    add("--arm", choices=ARMS, help="run one arm; for the processes that this starts")
    add("--budget", type=float, default=1.0, help="of that arm")
    args = parser.parse_args()
    if args.arm is not None:
        run_arm(args)
        return
    rows = [turn(arm, args) for arm in ARMS[:-1]]
    most = next(row["peak"] for row in rows if row["arm"] == "memory")
    budget, tried = choose_budget(args, most)
    rows.append(tried[-1])
    for _ in range(args.turns - 1):
        rows += [turn(arm, args, budget) for arm in ARMS]
    losses = [row["loss"] for row in rows]
    assert max(losses) <= 1.02 * min(losses), f"the arms disagree: {losses}"
    medians = {
        a: statistics.median(t for r in rows if r["arm"] == a for t in r["ms"]) for a in ARMS
    }
    peaks = {a: [r["peak"] for r in rows if r["arm"] == a and r["peak"] is not None] for a in ARMS}
    for arm in ARMS:
        shown = f"{statistics.median(peaks[arm]) / 1e9:.3f} GB" if peaks[arm] else "not measured"
        named = f"budget {budget}" if arm == "budget" else arm
        print(
            f"{named}: {medians[arm]:.3f} ms ({medians[arm] / medians['keep']:.3f}), peak {shown}"
        )
    print(next(row["report"] for row in rows if row["arm"] == "memory"))
    if args.json:
        shape, sequences = SHAPES[args.shape]
        about = {"shape": {**asdict(shape), "layers": LAYERS}, "sequences": sequences}
        record = {**provenance(), **about, "share": args.share, "rows": rows, "budgets": tried}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
