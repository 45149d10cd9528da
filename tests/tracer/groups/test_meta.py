"""An actor that begins on the meta device is never whole in the memory of a rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cg.ir.layout import shape_of
from cg.tracer.function.groups.meta import fill
from cg.tracer.values.mesh import mesh
from cg.tracer.values.pieces import lay_out
from cg.tracer.values.plan import ShardingPlan, cut, whole

WIDTH, LAYERS, RANKS = 64, 8, 4
GRID = mesh(tp=RANKS)


class Live(TorchDispatchMode):
    """Adds up the bytes of the host's memory that tensors have at a time.

    Attributes:
        peak: the most that there have been.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, made)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        living = {k: v for k, v in self._storages.items() if not v[0].expired()}
        self._storages = living
        self.peak = max(self.peak, sum(nbytes for _, nbytes in living.values()))
        return made


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.optimizer = torch.optim.Adam(self.parameters())


def filled(rank: int) -> tuple[Deep, int]:
    """The pieces of a rank, and the most bytes that there have been at once."""
    with torch.device("meta"):
        actor = Deep()
    logical = {t.path: t for t in lay_out(actor, ShardingPlan.of({"*": cut(0, "tp")}), whole, GRID)}
    torch.manual_seed(3)
    live = Live()
    with live:
        fill(actor, logical, GRID, rank, "deep")
    for path, tensor in logical.items():
        assert tensor.layout is not None
        region = tensor.layout.region(tensor.shape, GRID.position(rank))
        assert tuple(actor.get_parameter(path).shape) == shape_of(region)
    return actor, live.peak


def test_a_rank_never_holds_more_than_its_pieces_and_one_module() -> None:
    layer = 4 * (WIDTH * WIDTH + WIDTH)
    pieces = LAYERS * layer // RANKS
    for rank in GRID.ranks:
        _, peak = filled(rank)
        assert pieces <= peak <= pieces + 2 * layer, f"{peak} bytes on rank {rank}"
        assert peak < LAYERS * layer / 2


def test_the_pieces_are_those_of_one_model() -> None:
    torch.manual_seed(3)
    right = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    actors = [filled(rank)[0] for rank in GRID.ranks]
    for index, layer in enumerate(right):
        made = torch.cat([each.layers[index].weight for each in actors])
        assert torch.equal(made, layer.weight)
    held = actors[0].optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, actors[0].parameters(), strict=True))
    assert math.prod(held[0].shape) == WIDTH * WIDTH // RANKS
