"""Run a partitioned graph on all positions of a mesh in one process, and compare with the whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cg.ir.attributes import ReduceOp
from cg.ir.layout import WHOLE, Cut, Layout, Region, shape_of, within
from cg.ir.types import Mesh, Place
from cg.tracer.graph.layouts.change import Change
from cg.tracer.graph.layouts.propagation.partition import Part, Partition, partition
from cg.tracer.graph.layouts.propagation.propagate import propagate
from cg.tracer.graph.layouts.versions import End, LayoutTransfer, Propagation, Version
from cg.tracer.method.joint_graph import Joint

ALL = frozenset(Change)
COMBINE: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.PROD: torch.mul,
}

Pieces = list[torch.Tensor]
"""The pieces of a value that the ranks of a place hold, in order."""


def mesh(**axes: int) -> Mesh:
    return Mesh(tuple(range(math.prod(axes.values()))), "m", tuple(axes.items()))


def layout(text: str) -> Layout:
    """Cuts between commas, then summands: `dp,-,tp` or `-,dp.tp|tp`.

    `3*tp` is packed, `cp~` in zigzag order, and `cp+1` shifted.
    """
    cuts, _, summands = text.partition("|")
    return Layout(
        tuple(map(_cut, cuts.split(","))) if cuts else (),
        tuple(summands.split(".")) if summands else (),
    )


def _cut(text: str) -> Cut:
    blocks, _, order = text.rpartition("*")
    axes, _, shift = order.partition("+")
    names = tuple(axes.removesuffix("~").split("."))
    if axes == "-":
        return WHOLE
    return Cut(names, int(blocks or 1), zigzag=axes.endswith("~"), shift=int(shift or 0))


def at(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The part of a tensor in a region."""
    for dim, intervals in enumerate(region):
        indices = [i for start, stop in intervals for i in range(start, stop)]
        tensor = tensor.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    return tensor.contiguous()


def put(whole: torch.Tensor, region: Region, part: torch.Tensor) -> None:
    """Write a part of a tensor in a region."""
    grid = [
        torch.tensor([i for a, b in dim for i in range(a, b)], dtype=torch.int64) for dim in region
    ]
    if not grid:
        whole.copy_(part)
    elif all(len(dim) for dim in grid):
        whole[torch.meshgrid(*grid, indexing="ij")] = part


def distribute(tensor: torch.Tensor, layout: Layout, place: Place) -> Pieces:
    """The piece of a tensor on each rank; summands are random numbers that add up to it."""
    generator = torch.Generator().manual_seed(len(layout.summands) + tensor.numel())
    left: dict[tuple[Any, ...], torch.Tensor] = {}
    summand: list[torch.Tensor] = []
    for rank in place.ranks:
        key = _summand(place, rank, layout)
        if key not in left:
            left[key] = torch.randint(-4, 5, tensor.shape, generator=generator).to(tensor.dtype)
        summand.append(left[key])
    last = list(left)[-1]
    total = sum((v for k, v in left.items() if k != last), torch.zeros_like(tensor))
    left[last] = tensor - total if layout.summands else tensor
    keys = [_summand(place, rank, layout) for rank in place.ranks]
    return [
        at(left[key], layout.region(tuple(tensor.shape), place.position(rank)))
        for key, rank in zip(keys, place.ranks, strict=True)
    ]


def _summand(place: Place, rank: int, layout: Layout) -> tuple[Any, ...]:
    position = place.position(rank)
    return tuple(position[axis][0] for axis in layout.summands)


def collect(pieces: Pieces, layout: Layout, shape: tuple[int, ...], place: Place) -> torch.Tensor:
    """The logical tensor; ranks that should hold the same must do so."""
    sums: dict[tuple[Any, ...], torch.Tensor] = {}
    seen: dict[tuple[Any, ...], torch.Tensor] = {}
    # Not of the first piece: an op may give an empty one another dtype.
    dtype = max(pieces, key=torch.Tensor.numel).dtype
    for rank, piece in zip(place.ranks, pieces, strict=True):
        region = layout.region(shape, place.position(rank))
        piece = piece.reshape(shape_of(region))  # a product of cut factors comes as its factors
        key = _summand(place, rank, layout)
        known = seen.setdefault((key, region), piece)
        torch.testing.assert_close(known, piece, rtol=0, atol=0, equal_nan=True)
        put(sums.setdefault(key, torch.zeros(shape, dtype=dtype)), region, piece)
    total, *rest = sums.values()
    for other in rest:
        total = COMBINE[layout.reduce](total, other)
    return total


def transferred(pieces: Pieces, transfer: LayoutTransfer, place: Place) -> Pieces:
    """A transfer, by way of the logical tensor."""
    shape = tuple(transfer.before.node.meta["val"].shape)
    before, after = transfer.before.layout, transfer.after.layout
    kept = [axis for axis in before.summands if axis in after.summands]
    if not kept:
        whole = collect(pieces, before, shape, place)
        return distribute(whole, after, place)
    result: list[torch.Tensor | None] = [None] * len(pieces)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, rank in enumerate(place.ranks):
        position = place.position(rank)
        groups.setdefault(tuple(position[a][0] for a in kept), []).append(index)
    inner = Layout(before.cuts, tuple(a for a in before.summands if a not in kept), before.reduce)
    for members in groups.values():
        sub = _Some(place, [place.ranks[i] for i in members])
        whole = collect([pieces[i] for i in members], inner, shape, sub)
        for i in members:
            region = after.region(shape, place.position(place.ranks[i]))
            result[i] = at(whole, region)
    return [piece for piece in result if piece is not None]


class _Some(Place):
    """Some ranks of a place, with the positions that they have there."""

    def __init__(self, place: Place, ranks: list[int]) -> None:
        object.__setattr__(self, "ranks", tuple(ranks))
        object.__setattr__(self, "whole", place)

    def position(self, rank: int) -> Any:
        return self.whole.position(rank)  # type: ignore[attr-defined]


def run(
    cut: Partition,
    propagation: Propagation,
    owner: torch.nn.Module,
    given: Mapping[fx.Node, torch.Tensor],
) -> list[torch.Tensor | None]:
    """All parts on all ranks, with the transfers between them; the logical outputs.

    Args:
        given: the logical inputs, by nodes of the propagated graph.
    """
    place = propagation.place
    held: dict[Version, Pieces] = {
        version: distribute(given[version.node], version.layout, place) for version in cut.inputs
    }
    seed = torch.get_rng_state()
    states = [seed] * len(place.ranks)
    for part, transfers in cut.steps:
        graphs = [part.bodies.at(rank) for rank in place.ranks]
        modules = {graph: fx.GraphModule(owner, graph) for graph in graphs}  # ranks share graphs
        made = [run_rank(part, modules[g], i, held, states) for i, g in enumerate(graphs)]
        for index, version in enumerate(part.outputs):
            held[version] = [results[index] for results in made]
        for transfer in transfers:
            held[transfer.after] = transferred(held[transfer.before], transfer, place)
    torch.set_rng_state(seed)
    return [
        None if v is None else collect(held[v], v.layout, tuple(v.node.meta["val"].shape), place)
        for v in cut.outputs
    ]


def run_rank(
    part: Part,
    module: fx.GraphModule,
    index: int,
    held: Mapping[Version, Pieces],
    states: list[torch.Tensor],
) -> Any:
    """A part on the rank of an index, whose random numbers go on where they were."""
    torch.set_rng_state(states[index])
    given = [held[version][index].clone() for version in part.inputs]
    result = module(*given)
    states[index] = torch.get_rng_state()
    return result


def trace(function: Callable[..., Any], *tensors: torch.Tensor) -> fx.GraphModule:
    """The graph of aten ops of a function, with fakes."""
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor) for tensor in tensors]
    with mode:
        return make_fx(function)(*fakes)


@dataclass
class Run:
    propagation: Propagation
    cut: Partition
    joint: Joint | None = None

    @property
    def outputs(self) -> list[Layout | None]:
        return [None if v is None else v.layout for v in self.cut.outputs]

    @property
    def changes(self) -> list[Change]:
        return [t.change for t in self.propagation.transfers]


def simulate(
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    layouts: Sequence[Layout],
    place: Place,
    *,
    traced: fx.GraphModule | None = None,
    ends: Sequence[End] | None = None,
    allowed: frozenset[Change] = ALL,
) -> tuple[Run, list[torch.Tensor | None]]:
    """Lay a function out, and run it on all ranks."""
    owner = trace(function, *tensors) if traced is None else traced
    placeholders = [node for node in owner.graph.nodes if node.op == "placeholder"]
    ends = [End(None, True)] * 20 if ends is None else ends
    given = dict(zip(placeholders, layouts, strict=True))
    propagation = propagate(owner.graph, place, given, ends=ends, allowed=allowed)
    cut = partition(propagation)
    values = {
        propagation.copies[node]: tensor for node, tensor in zip(placeholders, tensors, strict=True)
    }
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Run(propagation, cut), run(cut, propagation, owner, values)


def check(
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    layouts: Sequence[Layout],
    place: Place,
    *,
    tolerance: float = 0.0,
    absolute: float | None = None,
    **simulated: Any,
) -> Run:
    """Lay a function out, run it on all ranks, and compare with what it gives for whole tensors."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        expected = function(*(tensor.clone() for tensor in tensors))
    expected = list(expected) if isinstance(expected, (tuple, list)) else [expected]
    laid_out, found = simulate(function, tensors, layouts, place, **simulated)
    wanted = [value for value in expected if isinstance(value, torch.Tensor)]
    made = [value for value in found if value is not None]
    near = {"rtol": tolerance, "atol": tolerance if absolute is None else absolute}
    for mine, theirs in zip(made, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, **near, equal_nan=True)
    return laid_out


def cuts(rank: int, place: Place, summands: bool = True) -> Iterator[Layout]:
    """All layouts of a tensor over the axes of a place, with plain cuts."""
    axes = [axis for axis, _ in place.axes]
    where = [*range(rank), *(["copy", "summand"] if summands else ["copy"])]
    for chosen in itertools.product(where, repeat=len(axes)):
        found: list[tuple[str, ...]] = [()] * rank
        for axis, dim in zip(axes, chosen, strict=True):
            if isinstance(dim, int):
                found[dim] = (*found[dim], axis)
        summed = tuple(a for a, dim in zip(axes, chosen, strict=True) if dim == "summand")
        yield Layout(tuple(map(Cut, found)), summed)


__all__ = ["ALL", "Run", "check", "cuts", "layout", "mesh", "simulate", "trace", "within"]
