"""Keep one rank's pieces of an actor's tensors, the logical tensors, and which memory they have."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...ir.layout import Intervals, Layout, Region, shape_of
from ...ir.types import Mesh
from .actor_state import StateTensor, collect
from .mesh import describe
from .optimizer_state import kept_by_optimizers
from .plan import Sharding, ShardingPlan, whole


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """The logical tensor that a tensor of an actor's state is a piece of.

    Attributes:
        path: its path, from the actor.
        shape: the shape of the whole tensor.
        layout: its layout over the actor's mesh; None if every rank holds a copy.
        used: the layout in which it is used, after a gather; None if ranks use a whole copy.
    """

    path: str
    shape: tuple[int, ...]
    layout: Layout | None
    used: Layout | None

    def local(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The shape of a rank's piece."""
        if self.layout is None:
            return self.shape
        return shape_of(self.layout.region(self.shape, mesh.position(rank)))


def lay_out(
    instance: object, plan: ShardingPlan, store: Sharding, mesh: Mesh
) -> tuple[LogicalTensor, ...]:
    """The layouts of an actor's tensors, in the order of `collect`.

    Args:
        instance: the actor, with whole tensors; they may be on the meta device.
        plan: says how tensors are cut where they are used.
        store: cuts trained tensors further, where they rest, along axes by which the plan does not
            cut them; scalars stay whole.
        mesh: the ranks that hold it.

    Raises:
        ValueError: a layout does not fit the tensor or the mesh; the mesh lacks an axis of the
            plan's sequence; two names of one tensor have different shardings; or a tensor that is
            cut, or what an optimizer keeps for it, shares memory with another.
    """
    unknown = [axis for axis in plan.sequence if axis not in dict(mesh.grid)]
    if unknown:
        raise ValueError(
            f"the plan's sequence= names '{unknown[0]}', but {describe(mesh)} has none; name an "
            "axis that cuts weights, or leave it out"
        )
    state = collect(instance)
    optimizer_tensors = [
        (entry.parameter.path, entry.tensor) for entry in kept_by_optimizers(state)
    ]
    tensors = [(state_tensor.path, state_tensor.tensor) for state_tensor in state.tensors]
    storages = Counter(_storage(tensor) for _, tensor in (*tensors, *optimizer_tensors))
    shared = {
        path for path, tensor in (*tensors, *optimizer_tensors) if storages[_storage(tensor)] > 1
    }
    logical = []
    for state_tensor in state.tensors:
        sharding = used = _sharding(state_tensor, plan)
        if state_tensor.is_trained and state_tensor.tensor.dim():  # not a scalar
            sharding = sharding & store.without(used.axes)
        tensor_name, shape = f"'{state_tensor.path}'", tuple(state_tensor.tensor.shape)
        layout = sharding.layout(mesh, shape, tensor_name)
        if layout is not None and state_tensor.path in shared:
            raise ValueError(
                f"{tensor_name} is cut, and shares memory with another tensor of the actor, or "
                "what an optimizer keeps for it does; give each its own memory, or leave it whole"
            )
        logical.append(
            LogicalTensor(state_tensor.path, shape, layout, used.layout(mesh, shape, tensor_name))
        )
    return tuple(logical)


def _sharding(tensor: StateTensor, plan: ShardingPlan) -> Sharding:
    """The sharding that the plan gives a tensor by any of its paths.

    Raises:
        ValueError: it gives two paths different shardings.
    """
    shardings = [(slot.path, plan.of_tensor(slot.path)) for slot in tensor.slots]
    named = [(path, sharding) for path, sharding in shardings if sharding is not None]
    for path, sharding in named[1:]:
        if sharding != named[0][1]:
            raise ValueError(
                f"'{named[0][0]}' and '{path}' are one tensor, and the plan cuts them "
                f"differently; write '{named[0][0]}|{path}'"
            )
    return named[0][1] if named else whole


def _storage(tensor: torch.Tensor) -> object:
    """The key that two tensors have in common if they share memory."""
    return tensor.untyped_storage()._cdata


def keep_pieces(
    instance: object, logical: tuple[LogicalTensor, ...], mesh: Mesh, rank: int
) -> None:
    """Replace an actor's whole tensors by a rank's pieces, gradients included.

    The tensors stay the same objects, so an optimizer still knows them. Tensors on the meta device
    do not change.

    An optimizer may have made its state in the constructor, as Adagrad does. The tensors that it
    keeps for a parameter, in its shape, are cut like the parameter.

    Args:
        instance: the actor, with whole tensors.
        logical: what `lay_out` has returned for it.
        mesh: the ranks that hold it.
        rank: the rank whose pieces to keep.
    """
    position = mesh.position(rank)
    state = collect(instance)
    beside: dict[int, list[torch.Tensor]] = {}
    for own in kept_by_optimizers(state):
        beside.setdefault(id(own.parameter), []).append(own.tensor)
    for state_tensor, logical_tensor in zip(state.tensors, logical, strict=True):
        if logical_tensor.layout is None or state_tensor.tensor.is_meta:
            continue
        region = logical_tensor.layout.region(logical_tensor.shape, position)
        for held in beside.get(id(state_tensor), ()):
            held.data = piece(held.data, region)
        tensor, grad = state_tensor.tensor, state_tensor.tensor.grad
        tensor.grad = None  # its shape is not that of the piece
        tensor.data = piece(tensor.data, region)
        tensor.grad = None if grad is None else piece(grad, region)


def piece(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """A copy of a region of a tensor, in memory of its own."""
    for dim, intervals in enumerate(region):
        tensor = _entries(tensor, dim, intervals)
    return tensor.clone(memory_format=torch.contiguous_format)


def _entries(tensor: torch.Tensor, dim: int, intervals: Intervals) -> torch.Tensor:
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in intervals]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)


def put(target: torch.Tensor, region: Region, value: torch.Tensor) -> None:
    """Copy a tensor to a region of another."""
    for dim, intervals in enumerate(region):
        if len(intervals) != 1:
            at = 0
            for start, stop in intervals:
                part = value.narrow(dim, at, stop - start)
                put(target, (*region[:dim], ((start, stop),), *region[dim + 1 :]), part)
                at += stop - start
            return
    target[tuple(slice(*interval) for (interval,) in region)].copy_(value)


class PieceMemory:
    """Knows which tensors are pieces, and how the logical tensors are cut.

    It goes by memory, not by tensor: `p.data` and `p.detach()` are pieces if `p` is one. It keeps
    no memory alive.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], tuple[StorageWeakRef, Layout]] = {}

    def note(self, tensor: torch.Tensor, layout: Layout) -> None:
        """Take note of a piece."""
        key = memory_key(tensor)
        if key is not None and key not in self._held:
            held = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._held[key] = held, layout

    def layout(self, tensor: torch.Tensor) -> Layout | None:
        """The layout of the logical tensor that a tensor is a piece of; None if it is no piece."""
        entry = self._held.get(memory_key(tensor))  # type: ignore[arg-type]
        return None if entry is None else entry[1]

    def forget_freed(self) -> None:
        """Forget memory that has been freed."""
        freed = [k for k, (held, _) in self._held.items() if held.expired()]  # type: ignore[no-untyped-call]
        for key in freed:
            del self._held[key]


def memory_key(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The storage of a tensor, and its offset there in bytes; None if it has no plain storage.

    The key is unique as long as somebody holds a weak reference to the storage. The offset tells
    gradients apart that lie one behind another in one storage.
    """
    if tensor.layout is not torch.strided:
        return None
    offset = int(tensor.storage_offset()) * tensor.element_size()
    return int(tensor.untyped_storage()._cdata), offset
