"""Trains models on meshes, and compares them with one process; prints hashes of what all hold.

mpiexec -n 4 python -m tests.mpi.groups_job some|all, or by CG_RANKS=4 with one process for all
ranks: the hashes are the same.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import torch
from torch import nn

import cg
from cg.ir.types import Mesh
from cg.launch.world.world import world
from cg.tracer.values.gradient_buckets import BUCKET
from tests.tracer.groups.training import (
    Attention,
    Block,
    Language,
    LongAttention,
    Mlp,
    Model,
    Residual,
    Tower,
    train,
)

SPARED = {
    *("loop", "vee", "residual", "attention", "stored", "adagrad", "rows", "heads"),
    *("task", "auto"),
}
"""Left out of `some`: each has a case beside it whose transfers are of the same kinds, or, as the
exchange of `heads`, is between processes in `conformance_job.py`."""


RING = cg.plan(
    {
        "forward(x)|loss(h)|loss(y)": cg.cut(1, "dp", order="zigzag"),
        "[qkv].weight": cg.cut(0, "tp"),
        "o.weight": cg.cut(1, "tp"),
    },
    attention="ring",
)


@cg.actor
class Careless(nn.Module):
    """Draws what its ranks do not draw alike, or raises on one of them."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        if raises and cg.rank() == 1:
            raise ValueError("no file here")
        number = 0.0 if raises else random.Random(cg.rank()).random()
        self.weight = nn.Parameter(torch.full((4,), number))


@cg.actor
class Uneven(nn.Module):
    """Learns at another rate on each of its ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0 + cg.rank())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)


@cg.actor
class Branching:
    """Takes another branch, and another number, on each of its ranks."""

    def __init__(self) -> None:
        self.is_precise = cg.rank() == 1
        self.factor = 2.0 + cg.rank()

    def widened(self, x: torch.Tensor) -> torch.Tensor:
        return x.double() if self.is_precise else x.clone()

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def main() -> None:
    torch.set_num_threads(1)
    left_out = SPARED if sys.argv[1] == "some" else set()
    for name, (model, places, rows, schedule, kind) in cases().items():
        if name in left_out:
            continue
        store = cg.cut(0, "dp") if name in ("stored", "adagrad") else cg.whole
        limit = 100 if name == "buckets" else BUCKET
        plans = [RING] * len(places) if name == "ring" else None
        stages = model.on(places, plans, store, limit)
        made = train(model, stages, rows, 2, schedule, kind, steps=2)
        for rank, digest in sorted(made.items()):
            print(f"{name} on rank {rank}: {digest}")
    for name, (model, places, rows, width, schedule, fsdp) in stored().items():
        if name in left_out:
            continue
        stages = model.on(places, store=cg.cut(0, "dp"))
        made = train(model, stages, rows, 2, schedule, "reals", steps=2, width=width, fsdp=fsdp)
        for rank, digest in sorted(made.items()):
            print(f"{name} on rank {rank}: {digest}")
    for rank, digest in sorted(large().items()):
        print(f"large on rank {rank}: {digest}")
    if world().is_virtual:
        return
    refuse("with other numbers", lambda: Careless.on(cg.mesh(dp=2))(raises=False))
    refuse("no file here", lambda: Careless.on(cg.mesh(dp=2))(raises=True))
    refuse("with other numbers", lambda: Uneven.on(cg.mesh(dp=2))())
    branching = Branching.on(cg.mesh(dp=2))()

    @cg.trace
    def branch(x: torch.Tensor) -> torch.Tensor:
        return branching.widened(x)

    refuse("different functions", lambda: branch.lower(torch.ones(4)))

    @cg.trace
    def scale(x: torch.Tensor) -> torch.Tensor:
        return branching.scaled(x)

    refuse("different functions", lambda: scale.lower(torch.ones(4)))


def refuse(message: str, make: Callable[[], object]) -> None:
    """Print what all ranks of a mesh say of an actor that cannot be made, and those beside it."""
    try:
        make()
    except (RuntimeError, ValueError, cg.TraceError) as error:
        assert message in str(error), error
        print(f"rank {cg.rank()} was told: {error}")
    else:
        raise AssertionError(f"nothing has been raised on rank {cg.rank()}")


Case = tuple[Model, tuple[Mesh, ...], int, str | None, str]


def cases() -> dict[str, Case]:
    """Models, the meshes of their stages, rows, schedules and kinds of batches."""
    pair = cg.mesh(pp=2, dp=1, tp=2).unbind("pp")
    overlap = cg.mesh(dp=3, tp=1), cg.mesh([2, 3], dp=1, tp=2)
    grid = (cg.mesh(dp=2, tp=2),)
    return {
        "mlp": (Model([(Mlp, (0,)), (Mlp, (1,))]), pair, 14, "zb-h1", "integers"),
        "loop": (Model([(Mlp, (i,)) for i in range(4)]), pair * 2, 14, "interleaved", "integers"),
        "vee": (
            Model([(Block, (i, "adam")) for i in range(4)]),
            (*pair, *pair[::-1]),
            8,
            "dualpipe-v",
            "reals",
        ),
        "residual": (Model([(Residual, (i,)) for i in range(2)]), pair, 14, "zb-h1", "integers"),
        "stored": (Model([(Block, (0, "adam"))]), grid, 14, None, "reals"),
        "adagrad": (Model([(Block, (0, "adagrad"))]), grid, 14, None, "reals"),
        "buckets": (Model([(Block, (0, "adam"))]), grid, 14, None, "reals"),
        "attention": (Model([(Attention, (0, "adam"))]), grid, 6, None, "reals"),
        "rows": (
            Model([(LongAttention, (0, "adam"))]),
            (cg.mesh(dp=3, tp=1),),
            4,
            None,
            "reals",
        ),
        "heads": (
            Model([(LongAttention, (i, "adam")) for i in range(2)]),
            cg.mesh(pp=2, dp=2, tp=1).unbind("pp"),
            4,
            "zb-h1",
            "reals",
        ),
        "ring": (
            Model([(LongAttention, (i, "adam")) for i in range(2)]),
            cg.mesh(pp=2, dp=2, tp=1).unbind("pp"),
            4,
            "zb-h1",
            "reals",
        ),
        "language": (Model([(Language, (0,))]), grid, 14, None, "words"),
        "overlap": (
            Model([(Block, (0, "sgd")), (Block, (1, "sgd"))]),
            overlap,
            14,
            "1f1b",
            "reals",
        ),
    }


def stored() -> dict[str, tuple[Model, tuple[Mesh, ...], int, int, str | None, object]]:
    """Models whose parameters are stored in pieces: of two stages, and uneven."""
    pair = cg.mesh(pp=2, dp=2, tp=1).unbind("pp")
    towers = Model([(Tower, (0, "adam")), (Tower, (1, "adam"))])
    uneven = Model([(Tower, (0, "sgd", 5))]), (cg.mesh([0, 2, 3], dp=3, tp=1),)
    return {
        "step": (towers, pair, 8, 8, "zb-h1", cg.fsdp(keep="step")),
        "task": (towers, pair, 8, 8, "1f1b", cg.fsdp(keep="task", prefetch=2)),
        "auto": (Model([(Block, (0, "sgd"))]), (cg.mesh(dp=2, tp=2),), 8, 8, None, cg.fsdp()),
        "uneven": (*uneven, 6, 5, None, None),
    }


def large() -> dict[int, str]:
    """Train a model whose gradients, of 2 MiB each, are added up where they are."""
    model = Model([(Tower, (0, "sgd", 512, 1))])
    stages = model.on([cg.mesh(dp=3, tp=1)])
    return train(model, stages, 6, 2, None, "reals", steps=2, width=512)


if __name__ == "__main__":
    main()
