"""Groups: the ranks that call a function together, and the actors that live on several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...ir.layout import WHOLE, Layout, volume
from ...ir.types import Mesh, Place
from ..errors import TraceError
from .actor_state import ActorState, StateTensor, collect
from .gradient_buckets import BUCKET
from .pieces import LogicalTensor, PieceMemory
from .plan import ShardingPlan


@dataclass(frozen=True, eq=False)
class GroupActor:
    """An actor on a mesh, as this process knows it.

    Attributes:
        name: the name of its handle.
        mesh: the ranks that hold its pieces.
        plan: how its tensors and the arguments of its methods are laid out.
        logical: its tensors when it was made, by path; empty where this process holds no pieces.
        instances: the objects with the pieces of the ranks that this process plays, by rank.
        bucket_bytes: as `Cls.on` takes it.
        memory: the memory that holds pieces, by rank; opaque methods look tensors up there.
        device: where gradients are, and tensors that do not rest elsewhere; None: on the host.
    """

    name: str
    mesh: Mesh
    plan: ShardingPlan
    logical: Mapping[str, LogicalTensor]
    instances: Mapping[int, Any]
    bucket_bytes: int = BUCKET
    memory: dict[int, PieceMemory] = field(default_factory=dict, repr=False)
    device: torch.device | None = None

    @property
    def first(self) -> int:
        """The first rank that this process plays."""
        return min(self.instances, key=self.mesh.ranks.index)

    def group(self, inputs: tuple[Layout | None, ...]) -> Group:
        """The group for a call of a method, with values in these layouts."""
        return Group(self.mesh, inputs, tuple(self.instances), self)

    def state(self, rank: int) -> ActorState:
        """The state of a rank's instance, each tensor with the shape of the logical one.

        Raises:
            TraceError: a tensor has another shape than the rank's piece had.
        """
        state = collect(self.instances[rank])
        state.tensors = self.whole(state.tensors, rank)
        return state

    def whole(self, tensors: list[StateTensor], rank: int) -> list[StateTensor]:
        """The tensors of a rank's instance, each with the shape of the logical one."""
        return [self._whole(tensor, rank) for tensor in tensors]

    def _whole(self, state: StateTensor, rank: int) -> StateTensor:
        logical = self.logical.get(state.path)
        if logical is None or logical.layout is None:
            return state
        held = logical.local(self.mesh, rank)
        if tuple(state.tensor.shape) != held:
            raise TraceError(
                f"'{state.path}' of {self.name} has shape {list(state.tensor.shape)} on rank "
                f"{rank}, where its piece of {list(logical.shape)} has shape {list(held)}",
                remedy="change what a tensor holds, not the tensor: p.data.copy_(piece)",
            )
        return replace(state, whole=logical.shape)

    def tensors(self, rank: int) -> dict[str, torch.Tensor]:
        """The tensors that a rank's instance holds, by path."""
        return {tensor.path: tensor.tensor for tensor in collect(self.instances[rank]).tensors}

    def shape(self, path: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """The shape of the logical tensor of which a rank holds a piece."""
        logical = self.logical.get(path)
        return tuple(tensor.shape) if logical is None else logical.shape

    @property
    def largest(self) -> dict[str, int]:
        """The number of elements of the largest piece of each tensor that is cut, by path."""
        positions = list(self.mesh.positions.values())
        return {
            path: max(volume(layout.region(self.logical[path].shape, at)) for at in positions)
            for path, layout in self.layouts.items()
        }

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layouts of the tensors that are cut, by path."""
        return {
            path: tensor.layout
            for path, tensor in self.logical.items()
            if tensor.layout is not None
        }

    @property
    def gathered(self) -> dict[str, Layout]:
        """The layouts in which stored parameters are used, by path."""
        return {
            path: tensor.used or Layout((WHOLE,) * len(tensor.shape))
            for path, tensor in self.logical.items()
            if tensor.used != tensor.layout
        }


@dataclass(frozen=True)
class Group:
    """The ranks that call a function together.

    Attributes:
        place: the ranks.
        inputs: the layouts of the values that the function takes, in order; None: copies.
        played: the ranks that this process plays.
        actor: the actor whose function it is, if any.
    """

    place: Place
    inputs: tuple[Layout | None, ...]
    played: tuple[int, ...]
    actor: GroupActor | None = field(default=None)

    @property
    def has_layouts(self) -> bool:
        """True if an input of a function, or a tensor of its actor, is laid out over the ranks."""
        state = self.actor.layouts if self.actor is not None else {}
        return bool(state) or any(layout is not None for layout in self.inputs)
