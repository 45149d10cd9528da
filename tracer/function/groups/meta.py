"""Fill an actor that began on the meta device, with a rank's pieces: from modules, or a source.

Without a source, each module says what it holds, and is made whole by itself. A source, such as a
folder of weights, gives the pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch

from ....ir.layout import Position, Region, whole
from ....ir.types import Mesh
from ...values.actor_state import ActorState, collect
from ...values.optimizer_state import kept_by_optimizers
from ...values.pieces import LogicalTensor, piece


@runtime_checkable
class _Resets(Protocol):
    """A module that can set the numbers of its own parameters, as torch's layers do."""

    def reset_parameters(self) -> None: ...


@runtime_checkable
class TensorSource(Protocol):
    """Where an actor's tensors come from that begin on the meta device: `on(..., init=source)`."""

    def names(self, wanted: Mapping[str, torch.Tensor], actor: str) -> Mapping[str, str]:
        """The source's names of tensors of an actor, by their path.

        Args:
            wanted: by path, tensors with the shapes and types of the whole ones.
            actor: its name, for messages.

        Raises:
            ValueError: it lacks one, or has one of another shape or type.
        """
        ...

    def read(self, name: str, region: Region, dtype: torch.dtype) -> torch.Tensor:
        """The part of a tensor in a region, in memory of its own.

        Raises:
            OSError: it cannot be read.
        """
        ...


Init: TypeAlias = Literal["whole", "meta"] | TensorSource
"""The origin of an actor's tensors: its constructor, its modules, or a source."""


def fill_from(
    source: TensorSource,
    instance: object,
    logical: Mapping[str, LogicalTensor],
    position: Position | None,
    name: str,
) -> None:
    """Give the tensors of an actor that are on the meta device what a source has for them.

    Tensors stay the objects that they are.

    Args:
        logical: of an actor on a mesh, what `lay_out` has returned, by path.
        position: of the rank on that mesh.

    Raises:
        ValueError, OSError: as the methods of the source do.
    """
    state = collect(instance)
    _refuse_kept(state, name)
    meta_tensors = {s.path: s.tensor for s in state.tensors if s.tensor.is_meta}
    names = source.names(meta_tensors, name)
    for path, tensor in meta_tensors.items():
        logical_tensor = logical.get(path)
        region = whole(tuple(tensor.shape))
        if (
            logical_tensor is not None
            and logical_tensor.layout is not None
            and position is not None
        ):
            region = logical_tensor.layout.region(logical_tensor.shape, position)
        value = source.read(names[path], region, tensor.dtype)
        if isinstance(tensor, torch.nn.Parameter):
            value = torch.nn.Parameter(value, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]


def fill(
    instance: object, logical: Mapping[str, LogicalTensor], mesh: Mesh, rank: int, name: str
) -> None:
    """Give the tensors of an actor their numbers, and keep a rank's pieces of them.

    Each module is made whole by itself, set by its `reset_parameters`, and cut, so that a rank
    never holds more than one whole module. Tensors stay the objects that they are.

    Raises:
        ValueError: nothing says what a tensor holds.
    """
    state = collect(instance)
    _refuse_kept(state, name)
    path_of = {id(t.tensor): t.path for t in state.tensors}
    done: set[int] = set()
    for module in instance.modules() if isinstance(instance, torch.nn.Module) else ():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        own = [t for t in tensors if t.is_meta and id(t) not in done]
        if not own:
            continue
        paths = [path_of[id(tensor)] for tensor in own]
        if not isinstance(module, _Resets):
            raise ValueError(
                f"{name} begins on the meta device, and {type(module).__name__} has no "
                f"reset_parameters() that says what '{paths[0]}' holds; write one"
            )
        if len(own) < len(tensors):
            raise ValueError(
                f"{name} begins on the meta device, and {type(module).__name__} shares a tensor "
                f"with another module beside '{paths[0]}'; make the actor without init='meta'"
            )
        for tensor in own:
            torch.utils.swap_tensors(tensor, _empty(tensor))  # type: ignore[no-untyped-call]
        module.reset_parameters()
        for tensor, path in zip(own, paths, strict=True):
            logical_tensor = logical[path]
            done.add(id(tensor))
            if logical_tensor.layout is not None:
                region = logical_tensor.layout.region(logical_tensor.shape, mesh.position(rank))
                tensor.data = piece(tensor.data, region)
    for state_tensor in collect(instance).tensors:
        if state_tensor.tensor.is_meta:
            raise ValueError(
                f"{name} begins on the meta device, and nothing says what '{state_tensor.path}' "
                "holds; make it a parameter or buffer of a module with reset_parameters()"
            )


def _refuse_kept(state: ActorState, name: str) -> None:
    """Refuse an optimizer that has made its state on the meta device, where it has no numbers."""
    for optimizer_tensor in kept_by_optimizers(state):
        if optimizer_tensor.tensor.is_meta:
            raise ValueError(
                f"{name} begins on the meta device, and "
                f"{type(optimizer_tensor.optimizer).__name__} has made its state there, in its "
                "constructor; take an optimizer that makes it in its first step, such as AdamW, "
                "or make the actor without init='meta'"
            )


def _empty(like: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(like, device="cpu")
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(empty, like.requires_grad)
    return empty
