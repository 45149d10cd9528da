"""A mixture of experts of Qwen3-30B-A3B on GPUs, by cg and by torch: milliseconds, in turns.

    python benchmarks/experts_gpu.py [--ranks 1] [--turns 3] [--steps 20] [--json FILE]
    python benchmarks/experts_gpu.py --ranks 2 --device cpu --shape tiny      # a trial, over gloo

The layer has a router, 8 of 128 experts a token, width 2,048 and inner width 768, in bfloat16. In
the row `train` a step is the forward and the backward with the gradients of all weights, of 8,192
tokens on each rank; in the row `decode` it is the forward of 64 tokens on each rank. Experts are
spread over the ranks.

cg runs a compiled step, which is captured; in `cg-fused` TorchInductor fuses it. Torch compiles the
layer by `torch.compile`: rows are sorted by expert and multiplied by
`torch.nn.functional.grouped_mm`; with several ranks `all_to_all_single` exchanges them with counts,
for which the host waits. Each arm is a job with a GPU for each rank. A figure is the median of the
steps of a turn behind others that warm up, on rank 0: host clocks around steps that end with a wait
for the device. The losses of the arms are compared.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from experts import Exchange
from provenance import provenance
from torch import Tensor, nn
from torch.nn import functional

ARMS, ROWS, WARM = ("cg", "cg-fused", "torch"), ("train", "decode"), 8


@dataclass(frozen=True)
class Shape:
    """Of the layer; tokens are those of each rank."""

    width: int
    inner: int
    experts: int
    choices: int
    tokens: int
    decoded: int
    dtype: torch.dtype


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8, 8192, 64, torch.bfloat16),
    "tiny": Shape(32, 16, 8, 2, 64, 8, torch.bfloat16),
}


class Layer(nn.Module):
    """Weights of a mixture, of which a rank holds `share` of the experts."""

    def __init__(self, shape: Shape, device: str, share: slice = slice(None)) -> None:
        super().__init__()
        torch.manual_seed(0)
        e, d, inner = shape.experts, shape.width, shape.inner
        weights = (torch.randn(e, d), torch.randn(e, 2 * inner, d), torch.randn(e, d, inner))
        router, up, down = ((0.02 * w).to(device, shape.dtype) for w in weights)
        self.choices = shape.choices
        self.router = nn.Parameter(router)
        self.up, self.down = nn.Parameter(up[share].clone()), nn.Parameter(down[share].clone())

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For each token the shares of its experts, and these."""
        shares, ids = functional.linear(x, self.router).float().softmax(-1).topk(self.choices)
        return shares.to(x.dtype), ids

    def clear(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None


def tokens_of(shape: Shape, row: str, ranks: int, device: str) -> Tensor:
    """Of all ranks, [tokens, width]."""
    count = ranks * (shape.tokens if row == "train" else shape.decoded)
    x = torch.randn(count, shape.width, generator=torch.Generator().manual_seed(1))
    return x.to(device, shape.dtype)


def loss_of(y: Tensor) -> Tensor:
    return y.float().square().mean()


def cg_step(
    shape: Shape, row: str, ranks: int, device: str, fuse: str | None
) -> tuple[Callable[[], float], int]:
    """A step, and the rank."""
    import cg

    class Mixture(Layer):
        def forward(self, x: Tensor) -> Tensor:
            shares, ids = self.route(x)
            gate, up = cg.expert_linear(x, self.up, ids).chunk(2, -1)
            h = cg.expert_linear(functional.silu(gate) * up, self.down, ids)
            return (h * shares.unsqueeze(-1)).sum(1)

        def loss(self, x: Tensor) -> Tensor:
            return loss_of(self.forward(x))

    cut = cg.cut(0, "ep")
    plan = {"up|down": cut, "loss(x)": cut}
    layer = cg.actor(Mixture).on(cg.mesh(ep=ranks), plan=plan)(shape, device)

    @cg.trace
    def train(x: Tensor) -> Tensor:
        loss = layer.loss(x)
        cg.backward(loss)
        layer.clear()
        return loss

    @cg.trace
    def decode(x: Tensor) -> Tensor:
        return layer.loss(x)

    x = tokens_of(shape, row, ranks, device)
    step = (train if row == "train" else decode).lower(x).compile(fuse=fuse)
    return lambda: float(step(x)), cg.rank()


def multiply(rows: Tensor, ids: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Rows [n, width], each by the two products of its own expert."""
    order = ids.argsort(stable=True)
    counts = torch.zeros(len(up), dtype=torch.int32, device=ids.device)
    counts = counts.scatter_add(0, ids, torch.ones_like(ids, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    h = functional.grouped_mm(rows[order], up.transpose(1, 2), offs=ends)
    gate, h = h.chunk(2, -1)
    h = functional.grouped_mm(functional.silu(gate) * h, down.transpose(1, 2), offs=ends)
    place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=ids.device))
    return h[place]


def torch_step(shape: Shape, row: str, ranks: int, device: str) -> tuple[Callable[[], float], int]:
    """A step, and the rank."""
    rank, own = 0, shape.experts // ranks
    if ranks > 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        rank = dist.get_rank()
        if device == "cuda":
            torch.cuda.set_device(rank)
    layer = Layer(shape, device, slice(rank * own, (rank + 1) * own))
    x = tokens_of(shape, row, ranks, device).chunk(ranks)[rank]
    product = torch.compile(multiply, dynamic=ranks > 1)
    k = shape.choices

    def alone(x: Tensor) -> Tensor:
        shares, ids = layer.route(x)
        h = multiply(x.repeat_interleave(k, 0), ids.flatten(), layer.up, layer.down)
        return loss_of((h.view(-1, k, shape.width) * shares.unsqueeze(-1)).sum(1))

    def together(x: Tensor) -> Tensor:
        shares, ids = layer.route(x)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=shape.experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, received = torch.stack([counts, theirs]).view(2, ranks, own).sum(2).tolist()
        rows = Exchange.apply(x[order // k], sent, received)
        experts = torch.arange(own, device=device).repeat(ranks).repeat_interleave(theirs)
        h = Exchange.apply(product(rows, experts, layer.up, layer.down), received, sent)
        h = h[order.argsort()].view(-1, k, shape.width)
        return loss_of((h * shares.unsqueeze(-1)).sum(1)) / ranks

    loss_function = torch.compile(alone) if ranks == 1 else together

    def step() -> float:
        with torch.set_grad_enabled(row == "train"):
            loss = loss_function(x)
        if row == "train":
            loss.backward()
            if ranks > 1:
                dist.all_reduce(layer.router.grad)
            layer.clear()
        total = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(total)
        return float(total)

    return step, rank


def run_arm(arm: str, row: str, args: argparse.Namespace) -> None:
    """One job's rank; rank 0 prints its times and the loss."""
    torch.set_num_threads(1)
    setting = SHAPES[args.shape], row, args.ranks, args.device
    if arm == "torch":
        step, rank = torch_step(*setting)
    else:
        step, rank = cg_step(*setting, "inductor" if arm == "cg-fused" else None)
    times, loss = [], 0.0
    for _ in range(WARM + args.steps):
        began = time.perf_counter()
        loss = step()
        times.append((time.perf_counter() - began) * 1e3)
    if rank == 0:
        print(json.dumps({"ms": [round(t, 4) for t in times[WARM:]], "loss": loss}), flush=True)
    if dist.is_initialized():
        dist.barrier()  # else a rank that ends first breaks the other's connections
        dist.destroy_process_group()


def turn(arm: str, row: str, args: argparse.Namespace) -> dict[str, Any]:
    """A job of an arm."""
    start = {
        "cg": ["-m", "cg.launch", "-n", str(args.ranks)],
        "cg-fused": ["-m", "cg.launch", "-n", str(args.ranks)],
        "torch": ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"],
    }[arm]
    options = ["--steps", args.steps, "--ranks", args.ranks, "--shape", args.shape]
    options += ["--device", args.device, "--arm", arm, "--row", row]
    done = subprocess.run(
        [sys.executable, *start, __file__, *map(str, options)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(lines[-1])
    return {"arm": arm, "row": row, **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, default=1)
    add("--turns", type=int, default=3)
    add("--steps", type=int, default=20)
    add("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--json", type=Path)
    add("--arm", choices=ARMS, help="run one arm's rank; for the jobs that this starts")
    add("--row", choices=ROWS, help="the row of that arm")
    args = parser.parse_args()
    if args.arm is not None:
        run_arm(args.arm, args.row, args)
        return
    rows = [turn(arm, row, args) for row in ROWS for _ in range(args.turns) for arm in ARMS]
    for row in ROWS:
        medians = {
            arm: statistics.median(
                t for r in rows if (r["arm"], r["row"]) == (arm, row) for t in r["ms"]
            )
            for arm in ARMS
        }
        losses = [r["loss"] for r in rows if r["row"] == row]
        assert max(losses) <= 1.02 * min(losses), f"the arms disagree: {losses}"
        figures = [f"{a} {ms:.3f} ms ({ms / medians['torch']:.2f})" for a, ms in medians.items()]
        print(f"{row}: {', '.join(figures)}")
    if args.json:
        shape = {**asdict(SHAPES[args.shape]), "dtype": str(SHAPES[args.shape].dtype)}
        record = {**provenance(), "ranks": args.ranks, "shape": shape, "rows": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
