"""Fill an actor that began on the meta device: module by module, of which pieces are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch

from ...ir.types import Mesh
from ..actors.actor_state import collect
from .pieces import LogicalTensor, piece


@runtime_checkable
class _Resets(Protocol):
    """A module that can set the numbers of its own parameters, as torch's layers do."""

    def reset_parameters(self) -> None: ...


def fill(
    instance: object, logical: Mapping[str, LogicalTensor], mesh: Mesh, rank: int, name: str
) -> None:
    """Give the tensors of an actor their numbers, and keep a rank's pieces of them.

    Each module is made whole by itself, set by its `reset_parameters`, and cut, so that a rank
    never holds more than one whole module. Tensors stay the objects that they are.

    Raises:
        ValueError: nothing says what a tensor holds.
    """
    path_of = {id(t.tensor): t.path for t in collect(instance).tensors}
    done: set[int] = set()
    for module in instance.modules() if isinstance(instance, torch.nn.Module) else ():
        held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        own = [t for t in held if t.is_meta and id(t) not in done]
        if not own:
            continue
        paths = [path_of[id(tensor)] for tensor in own]
        if not isinstance(module, _Resets):
            raise ValueError(
                f"{name} begins on the meta device, and {type(module).__name__} has no "
                f"reset_parameters() that says what '{paths[0]}' holds; write one"
            )
        if len(own) < len(held):
            raise ValueError(
                f"{name} begins on the meta device, and {type(module).__name__} shares a tensor "
                f"with another module beside '{paths[0]}'; make the actor without init='meta'"
            )
        for tensor in own:
            torch.utils.swap_tensors(tensor, _empty(tensor))  # type: ignore[no-untyped-call]
        module.reset_parameters()
        for tensor, path in zip(own, paths, strict=True):
            kept = logical[path]
            done.add(id(tensor))
            if kept.layout is not None:
                region = kept.layout.region(kept.shape, mesh.position(rank))
                tensor.data = piece(tensor.data, region)
    for state in collect(instance).tensors:
        if state.tensor.is_meta:
            raise ValueError(
                f"{name} begins on the meta device, and nothing says what '{state.path}' holds; "
                "make it a parameter or buffer of a module with reset_parameters()"
            )


def _empty(like: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(like, device="cpu")
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(empty, like.requires_grad)
    return empty
