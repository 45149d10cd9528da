"""Fill an actor on the meta device with a rank's pieces, from its modules or from a source.

Without a source, one module after the other is allocated whole, fills itself, and is cut. A
source, such as a folder of weights, gives the pieces.
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
    """A module that can initialize its own parameters, as torch's layers do."""

    def reset_parameters(self) -> None: ...


class ReadableTensor(Protocol):
    """A tensor of a source."""

    def read(self, region: Region, dtype: torch.dtype) -> torch.Tensor:
        """Read a region of the tensor into new memory.

        Args:
            region: the part to read.
            dtype: the dtype of the tensor that is returned.

        Raises:
            OSError: the tensor cannot be read.
        """
        ...


@runtime_checkable
class TensorSource(Protocol):
    """A source of tensors for an actor that begins on the meta device: `on(..., init=source)`."""

    def tensors(
        self, instance: object, wanted: Mapping[str, torch.Tensor], actor: str
    ) -> Mapping[str, ReadableTensor]:
        """The source's tensors for an actor's, by the path of the tensor.

        Args:
            instance: the actor's instance.
            wanted: meta tensors of it, with the whole shapes and the dtypes, by path.
            actor: the actor's name, for messages.

        Raises:
            ValueError: the source lacks a tensor, or has one of another shape or dtype.
        """
        ...


Init: TypeAlias = Literal["whole", "meta"] | TensorSource
"""The origin of an actor's tensors: the constructor ("whole"), modules ("meta"), or a source."""


def fill_from(
    source: TensorSource,
    instance: object,
    logical: Mapping[str, LogicalTensor],
    position: Position | None,
    name: str,
) -> None:
    """Fill the tensors of an actor that are on the meta device from a source.

    The tensors stay the same Python objects.

    Args:
        source: gives the tensors.
        instance: the actor's instance.
        logical: the tensors that `lay_out` has returned for an actor on a mesh, by path.
        position: the rank's position on that mesh; None for an actor on one rank.
        name: the actor's name, for messages.

    Raises:
        ValueError: the source lacks a tensor, has one of another shape or dtype, or an optimizer
            has made its state on the meta device.
        OSError: the source cannot be read.
    """
    state = collect(instance)
    _refuse_kept(state, name)
    meta_tensors = {s.path: s.tensor for s in state.tensors if s.tensor.is_meta}
    sources = source.tensors(instance, meta_tensors, name)
    for path, tensor in meta_tensors.items():
        logical_tensor = logical.get(path)
        region = whole(tuple(tensor.shape))
        if (
            logical_tensor is not None
            and logical_tensor.layout is not None
            and position is not None
        ):
            region = logical_tensor.layout.region(logical_tensor.shape, position)
        value = sources[path].read(region, tensor.dtype)
        if isinstance(tensor, torch.nn.Parameter):
            value = torch.nn.Parameter(value, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]


def fill(
    instance: object, logical: Mapping[str, LogicalTensor], mesh: Mesh, rank: int, name: str
) -> None:
    """Initialize the tensors of an actor, and keep a rank's pieces of them.

    One module after the other is allocated whole, filled by its `reset_parameters`, and cut. So a
    rank never holds more than one whole module. The tensors stay the same Python objects.

    Raises:
        ValueError: a tensor belongs to no module with `reset_parameters`, or to several modules;
            or an optimizer has made its state on the meta device.
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
    """Refuse an optimizer whose state is on the meta device, where it has no elements."""
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
