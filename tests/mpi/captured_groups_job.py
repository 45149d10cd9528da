"""Trains actors on meshes of devices, replayed as they are: the same numbers as on one device.

    mpiexec -n 2 python -m tests.mpi.device_job tests.mpi.captured_groups_job tp dp buckets pp clip
    mpiexec -n 2 python -m tests.mpi.captured_groups_job tp dp buckets stored pp clip     # on GPUs

Each word is a way to share the model out; `buckets` is `dp` with several buckets of gradients,
`clip` is `tp` with clipping, and in `sums` each step adds to the gradients of the one before. Every
rank trains the whole model by itself, too, on its own device. Its program must be one graph, as
that of actors on single ranks is; but for clipping, whose last part is opaque.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import cg
from cg.ir.types import Mesh
from cg.launch.world import world as worlds
from cg.tracer.values.gradient_buckets import BUCKET
from cg.tracer.values.pieces import piece
from cg.tracer.values.plan import Sharding

from .training_job import difference, segments_of

WIDTH, ROWS, MICROBATCHES, STEPS, RTOL, NORM = 32, 16, 2, 7, 1e-5, 0.05
COLUMNS = {"up.*": cg.cut(0, "tp"), "down.weight": cg.cut(1, "tp")}
BATCH = {"forward(x)|loss(h)|loss(y)": cg.cut(0, "dp")}


@cg.actor
class Block(nn.Module):
    """A residual block, and a loss. x: [rows, WIDTH] float32."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        with torch.device("cpu"):
            self.norm = nn.LayerNorm(WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def loss(self, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((h - y) ** 2).mean()


def places(kind: str) -> tuple[Sequence[Mesh], Sharding]:
    """The meshes of two stages, and how parameters rest."""
    ranks = cg.world_size()
    made: dict[str, Callable[[], Sequence[Mesh]]] = {
        "tp": lambda: [cg.mesh(dp=1, tp=ranks)] * 2,
        "clip": lambda: [cg.mesh(dp=1, tp=ranks)] * 2,
        "sums": lambda: [cg.mesh(dp=1, tp=ranks)] * 2,
        "dp": lambda: [cg.mesh(dp=ranks, tp=1)] * 2,
        "buckets": lambda: [cg.mesh(dp=ranks, tp=1)] * 2,
        "stored": lambda: [cg.mesh(dp=ranks, tp=1)] * 2,
        "pp": lambda: [
            cg.mesh(range(ranks // 2), dp=1, tp=ranks // 2),
            cg.mesh(range(ranks // 2, ranks), dp=ranks // 2, tp=1),
        ],
    }
    return made[kind](), cg.cut(0, "dp") if kind == "stored" else cg.whole


def train(kind: str) -> float:
    """Train, and alone beside it; the largest relative difference of a loss or a gradient."""
    meshes, store = places(kind)
    limit = 4 * 2 * WIDTH * WIDTH if kind == "buckets" else BUCKET
    stages = [
        Block.on(place, plan=COLUMNS | BATCH, store=store, bucket_bytes=limit)(seed)  # type: ignore[attr-defined]
        for seed, place in enumerate(meshes)
    ]

    @cg.trace
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = []
        for h, target in cg.microbatches((x, y), MICROBATCHES):
            for stage in stages:
                h = stage.forward(h)
            losses.append(stages[-1].loss(h, target))
        loss = cg.mean(losses)
        cg.backward(loss)
        if kind == "clip":
            cg.clip_grad_norm(stages, NORM)
        return loss

    mine = {i: s.local for i, s in enumerate(stages) if cg.rank() in s.place.ranks}
    device = next(next(iter(mine.values())).parameters()).device
    alone = [Block(seed).to(device) for seed in range(len(stages))]
    compiled = step.lower(*data(0)).compile()
    worst = 0.0
    for number in range(STEPS):
        found = compiled(*data(number))
        parts = []
        chunks = [each.to(device).chunk(MICROBATCHES) for each in data(number)]
        for px, py in zip(*chunks, strict=True):
            for block in alone:
                px = block.forward(px)
            parts.append(alone[-1].loss(px, py))
        wanted = torch.stack(parts).mean()
        wanted.backward()
        if kind == "clip":
            nn.utils.clip_grad_norm_([p for block in alone for p in block.parameters()], NORM)
        pairs = [(found, wanted.detach())]
        for index, block in mine.items():
            pairs += _gradients(stages[index], block, alone[index])
        worst = max(worst, *(difference(one, two) for one, two in pairs if two.numel()))
        assert worst <= RTOL, f"{kind}, step {number}: {worst}"
        if number % 3 and kind != "sums":  # else the next step adds to them
            for block in (*mine.values(), *alone):
                block.zero_grad()
    if worlds.world().device is not None:
        segments = segments_of(compiled)
        assert len(segments) == 1 or kind == "clip", f"{len(segments)} graphs"
        assert all(each.reason is None for each in segments), [each.reason for each in segments]
        assert all(each.replays > 0 for each in segments), "it was not replayed"
    compiled.close()
    return worst


def _gradients(stage: Any, local: Any, whole: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    wanted, found = dict(whole.named_parameters()), []
    for name, parameter in local.named_parameters():
        logical, right = stage._group.logical[name], wanted[name].grad
        if logical.layout is not None:
            place = stage.place.position(cg.rank())
            right = piece(right, logical.layout.region(logical.shape, place))
        found.append((parameter.grad, right))
    return found


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step: two tensors float32[ROWS, WIDTH] on the host."""
    x, y = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, y


def main() -> None:
    # cuBLAS asks for it where sums are to be in the same order each time.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(1)
    for kind in sys.argv[1:]:
        worst = train(kind)
        print(f"rank {cg.rank()}: {kind} is replayed, and differs by {worst:.1e}", flush=True)


if __name__ == "__main__":
    main()
