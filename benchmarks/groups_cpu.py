"""Training steps of groups on hosts: tensor and data parallel, against DTensor, DDP and FSDP2.

    python -m cg.launch -n 2 benchmarks/groups_cpu.py

The peers run in the same processes over gloo, in turns with cg (ABAB...). A step is forward,
backward and SGD. Figures are medians, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from all_reduce import join_gloo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import cg

ROWS, TOKENS = 8, 16
PLANS = {
    "tp": {"*.up.*": cg.cut(0, "tp"), "*.down.weight": cg.cut(1, "tp")},
    "dp": {"loss(x)": cg.cut(0, "dp")},
}


class Block(nn.Module):
    """A residual block of a norm and two linear layers. x: [rows, tokens, width] float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Layer(nn.Module):
    """A layer of a GPT: attention with 8 heads, then a block. x: [rows, tokens, width] float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.block = Block(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        heads = self.qkv(self.norm(x)).view(rows, tokens, 3, 8, width // 8)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.block(x + self.out(mixed.transpose(1, 2).flatten(2)))


class Model(nn.Module):
    """Blocks, or layers of a GPT; the mean of the squares of what comes out is a loss."""

    def __init__(self, width: int, layers: int, is_gpt: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        make = Layer if is_gpt else Block
        self.blocks = nn.Sequential(*(make(width) for _ in range(layers)))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(x)


@cg.actor
class Trained(Model):
    """The model with its optimizer, as an actor."""

    def __init__(self, width: int, layers: int, is_gpt: bool) -> None:
        super().__init__(width, layers, is_gpt)
        self.opt = torch.optim.SGD(self.parameters(), lr=1e-3)

    def update(self) -> None:
        self.opt.step()
        self.opt.zero_grad()


def compiled(kind: str, width: int, layers: int, x: torch.Tensor) -> Callable[[], object]:
    """A step of cg: `tp`, `dp`, or `fsdp`."""
    ranks = cg.world_size()
    axis = "tp" if kind == "tp" else "dp"
    store = cg.cut(0, "dp") if kind == "fsdp" else cg.whole
    model = Trained.on(cg.mesh(**{axis: ranks}), plan=PLANS[axis], store=store)(
        width, layers, kind != "tp"
    )

    @cg.trace
    def step(x):
        loss = model.loss(x)
        cg.backward(loss)
        model.update()
        return loss

    run = step.lower(x).compile()
    return lambda: run(x)


def peer(kind: str, width: int, layers: int, x: torch.Tensor) -> Callable[[], object]:
    """The same step of DTensor (`tp`), DDP (`dp`) or FSDP2 (`fsdp`)."""
    model: nn.Module = Model(width, layers, kind != "tp")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if kind == "tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, init_device_mesh("cpu", (ranks,)), plan)
    elif kind == "dp":
        model = DistributedDataParallel(model)
    else:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    own = x if kind == "tp" else x.chunk(ranks)[rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def go() -> None:
        model(own).backward()
        optimizer.step()
        optimizer.zero_grad()

    return go


def measure(go: Callable[[], object], rounds: int) -> float:
    """Median time of a step, in ms."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        go()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


CASES = {
    "tensor parallel, width 64": ("tp", 64, 1, 100),
    "tensor parallel, width 1024": ("tp", 1024, 1, 10),
    "data parallel GPT, width 512, 4 layers": ("dp", 512, 4, 10),
    "fully sharded GPT, width 512, 4 layers": ("fsdp", 512, 4, 10),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    if cg.world_size() < 2:
        raise SystemExit("this benchmark needs ranks: python -m cg.launch -n 2 " + __file__)
    torch.set_num_threads(1)
    join_gloo()
    found: dict[str, dict[str, list[float]]] = {}
    for case, (kind, width, layers, rounds) in CASES.items():
        x = torch.randn(ROWS, TOKENS, width, generator=torch.Generator().manual_seed(1))
        arms = {"cg": compiled(kind, width, layers, x), "peer": peer(kind, width, layers, x)}
        figures: dict[str, list[float]] = {name: [] for name in arms}
        for repeat in range(args.repeats + 1):
            for name, go in arms.items():
                cg.barrier()
                figure = measure(go, rounds if repeat else 3)
                if repeat:  # the first turn only warms up
                    figures[name].append(figure)
        found[case] = figures
        if cg.rank() == 0:
            mine, theirs = (statistics.median(figures[name]) for name in ("cg", "peer"))
            print(
                f"{case}: cg {mine:.2f} ms, peer {theirs:.2f} ms: {theirs / mine:.2f}x", flush=True
            )
    if cg.rank() == 0 and args.json:
        with open(args.json, "w") as file:
            json.dump(found, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
