"""A call to trace: what is called, on whose state, with what arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from ...ir.location import Location
from ..actors.actor_state import ActorState
from ..heap.kinds import is_plain, is_walked
from ..step.specs import ObjectSpec, Static, TensorSpec, Tree


@dataclass(frozen=True)
class Call:
    """A call to trace.

    Attributes:
        what: in words, such as `Stage.forward`.
        function: what is called.
        state: the state of the actor; empty for a function of values alone.
        signature: the arguments, a pytree `(args, kwargs)`.
        device: where values live.
        loc: where the step makes the call.
        home: where the method is defined.
        given: the objects among the arguments that have attributes, each with its name in words.
    """

    what: str
    function: Callable[..., Any]
    state: ActorState
    signature: Tree
    device: torch.device
    loc: Location | None
    home: Location | None
    given: tuple[tuple[Any, str], ...] = ()

    @property
    def blame(self) -> Location | None:
        """The line to name where no line of the method's body is known."""
        return self.home or self.loc

    def values(self) -> list[tuple[TensorSpec | ObjectSpec, str]]:
        """The value leaves of the signature, each with its name in words."""
        return [
            (leaf, argument_name(self.signature, i))
            for i, leaf in enumerate(self.signature.leaves)
            if not isinstance(leaf, Static)
        ]


def given_objects(signature: Tree) -> tuple[tuple[Any, str], ...]:
    """The objects among the arguments of a method that have attributes of the user's."""
    return tuple(
        (leaf.value, argument_name(signature, i))
        for i, leaf in enumerate(signature.leaves)
        if isinstance(leaf, Static) and not is_plain(leaf.value) and is_walked(leaf.value)
    )


def argument_name(signature: Tree, index: int) -> str:
    """A leaf of the arguments in words: `argument 1`, `argument 'mask'`."""
    numbered = pytree.tree_unflatten(range(len(signature.leaves)), signature.spec)
    path, _ = pytree.tree_flatten_with_path(numbered)[0][index]
    _, where, *inner = path
    within = f" at {pytree.keystr(tuple(inner))}" if inner else ""
    return f"argument {pytree.keystr((where,))[1:-1]}{within}"
