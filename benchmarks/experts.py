"""A mixture of experts over two CPU ranks, by cg and by torch: milliseconds a step, in turns.

    python benchmarks/experts.py [--widths 64 1024] [--turns 5] [--steps 100] [--json FILE]

A step is the forward and the backward of one layer: a router, two of eight experts a token, which
are spread over two ranks, a gated product with SiLU, and the gradients of all weights, in float32.
Each rank has 256 tokens. cg gathers tokens and reduces results; in an arm of its own it exchanges
the rows that experts need. Torch sorts rows by expert and exchanges them by `all_to_all_single`
over Gloo with counts, dropless, and multiplies each expert's rows in a loop. Each arm is a job of
two ranks with one thread each. A figure is the median of the steps of a turn behind 30 others, on
the slower rank; the losses of all arms are compared.
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
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from provenance import provenance
from torch import Tensor, nn
from torch.nn import functional

RANKS, EXPERTS, CHOICES, TOKENS, WARM = 2, 8, 2, 256, 30
ARMS = ("gather", "exchange", "torch")


class Layer(nn.Module):
    """Weights of a mixture: a router, and for each expert `up` [2 · inner, width] and `down`."""

    def __init__(self, width: int, experts: slice = slice(None)) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = 2 * width
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.up = nn.Parameter((torch.randn(EXPERTS, 2 * inner, width) * 0.05)[experts].clone())
        self.down = nn.Parameter((torch.randn(EXPERTS, width, inner) * 0.05)[experts].clone())

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares, ids = self.router(x).softmax(-1).topk(CHOICES)
        return shares, ids

    def clear(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None


def tokens(width: int) -> Tensor:
    """Of both ranks, float32 [tokens, width]."""
    return torch.randn(RANKS * TOKENS, width, generator=torch.Generator().manual_seed(1))


def cg_step(width: int, dispatch: Literal["gather", "exchange"]) -> tuple[Callable[[], float], int]:
    """A step, and the rank."""
    import cg

    class Mixture(Layer):
        def loss(self, x: Tensor) -> Tensor:
            shares, ids = self.route(x)
            gate, up = cg.expert_linear(x, self.up, ids).chunk(2, -1)
            h = cg.expert_linear(functional.silu(gate) * up, self.down, ids)
            return (x + (h * shares.unsqueeze(-1)).sum(1)).square().mean()

    plan = {"up|down": cg.cut(0, "ep"), "loss(x)": cg.cut(0, "ep")}
    layer = cg.actor(Mixture).on(cg.mesh(ep=RANKS), plan=plan)(width)

    @cg.trace
    def step(x: Tensor) -> Tensor:
        loss = layer.loss(x)
        cg.backward(loss)
        layer.clear()
        return loss

    x = tokens(width)
    compiled = step.lower(x).compile(dispatch=dispatch)
    return lambda: float(compiled(x)), cg.rank()


class Exchange(torch.autograd.Function):
    """Rows to the ranks of their experts; the backward brings gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.counts = sent, received
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        sent, received = ctx.counts
        result = gradient.new_empty(sum(sent), gradient.shape[1])
        dist.all_to_all_single(result, gradient.contiguous(), sent, received)
        return result, None, None


def torch_step(width: int) -> tuple[Callable[[], float], int]:
    """A step, and the rank."""
    dist.init_process_group("gloo")
    rank, own = dist.get_rank(), EXPERTS // RANKS
    layer = Layer(width, slice(rank * own, (rank + 1) * own))
    x = tokens(width)[rank * TOKENS : (rank + 1) * TOKENS]

    def mixture() -> Tensor:
        shares, ids = layer.route(x)
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent = counts.view(RANKS, own).sum(1).tolist()
        received = theirs.view(RANKS, own).sum(1).tolist()
        rows = Exchange.apply(x[order // CHOICES], sent, received)
        experts = torch.arange(own).repeat(RANKS).repeat_interleave(theirs)
        by_expert = experts.argsort(stable=True)
        sorted_rows = rows[by_expert].split(theirs.view(RANKS, own).sum(0).tolist())
        results = []
        for index, part in enumerate(sorted_rows):
            gate, up = (part @ layer.up[index].T).chunk(2, -1)
            results.append((functional.silu(gate) * up) @ layer.down[index].T)
        back = torch.empty_like(by_expert)
        back[by_expert] = torch.arange(len(by_expert))
        rows = Exchange.apply(torch.cat(results)[back], received, sent)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        h = rows[place].view(TOKENS, CHOICES, width)
        return x + (h * shares.unsqueeze(-1)).sum(1)

    def step() -> float:
        loss = mixture().square().mean() / RANKS
        loss.backward()
        dist.all_reduce(layer.router.weight.grad)
        total = loss.detach().clone()
        dist.all_reduce(total)
        layer.clear()
        return float(total)

    return step, rank


def run_arm(arm: Literal["gather", "exchange", "torch"], width: int, steps: int) -> None:
    """One job's rank; rank 0 prints its times and the loss."""
    torch.set_num_threads(1)
    step, rank = torch_step(width) if arm == "torch" else cg_step(width, arm)
    times, loss = [], 0.0
    for _ in range(WARM + steps):
        began = time.perf_counter()
        loss = step()
        times.append((time.perf_counter() - began) * 1e3)
    if rank == 0:
        print(json.dumps({"ms": [round(t, 3) for t in times[WARM:]], "loss": loss}), flush=True)
    if arm == "torch":
        dist.barrier()  # else a rank that ends first breaks the other's connections
        dist.destroy_process_group()


def turn(arm: str, width: int, steps: int) -> dict[str, Any]:
    """A job of an arm."""
    start = ["-m", "cg.launch", "-n", str(RANKS)]
    if arm == "torch":
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [sys.executable, *start, __file__, "--arm", arm, "--widths", str(width)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--steps", str(steps)],
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(lines[-1])
    return {"arm": arm, "width": width, **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--widths", type=int, nargs="+", default=[64, 1024])
    add("--turns", type=int, default=5)
    add("--steps", type=int, default=100)
    add("--json", type=Path)
    add("--arm", choices=ARMS, help="run one arm's rank; for the jobs that this starts")
    args = parser.parse_args()
    if args.arm is not None:
        run_arm(args.arm, args.widths[0], args.steps)
        return
    rows = [
        turn(arm, width, args.steps)
        for width in args.widths
        for _ in range(args.turns)
        for arm in ARMS
    ]
    for width in args.widths:
        medians = {
            arm: statistics.median(
                t for r in rows if (r["arm"], r["width"]) == (arm, width) for t in r["ms"]
            )
            for arm in ARMS
        }
        losses = {round(r["loss"], 4) for r in rows if r["width"] == width}
        assert len(losses) == 1, f"the arms disagree: {losses}"
        figures = [f"torch {medians['torch']:.2f} ms"]
        for arm in ARMS[:-1]:
            ratio = medians[arm] / medians["torch"]
            figures.append(f"{arm} {medians[arm]:.2f}: {ratio:.2f}")
        print(f"width {width}: {', '.join(figures)}")
    if args.json:
        args.json.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
