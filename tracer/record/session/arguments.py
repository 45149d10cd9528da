"""Split the arguments of a call that the step makes into operands and static arguments."""

from __future__ import annotations

from collections.abc import ItemsView, ValuesView
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from ....ir.location import Location
from ...errors import TraceError
from ...values.specs import Static, Tree, show_type, static_key
from ...values.values import NotAValue, ObjectValue, Traced, TracedTensor
from .session import Session
from .unsupported_ops import unsupported_library


@dataclass(slots=True)
class Arguments:
    """The arguments of a call.

    Attributes:
        operands: the arguments that are values of the step, in order.
        key: a hashable key, equal for calls with equal signatures.
        leaves: all leaves of the pytree `(args, kwargs)`.
        spec: the structure of this pytree.
    """

    operands: list[Traced]
    key: tuple[Any, ...]
    leaves: list[Any]
    spec: TreeSpec

    @property
    def values(self) -> list[TracedTensor | ObjectValue]:
        """The objects that the step's Python holds for the operands."""
        return [x for x in self.leaves if type(x) is TracedTensor or type(x) is ObjectValue]

    def signature(self) -> Tree:
        """The pytree `(args, kwargs)` with specs in place of the leaves."""
        leaves = (
            leaf.traced.spec if isinstance(leaf, TracedTensor | ObjectValue) else Static(leaf)
            for leaf in self.leaves
        )
        return Tree(tuple(leaves), self.spec)


_PLAIN = frozenset({TracedTensor, ObjectValue, int, float, bool, str, type(None), torch.dtype})


@cache
def _flat_spec(count: int) -> TreeSpec:
    return tree_flatten(((0,) * count, {}))[1]


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec, Any]:
    """The leaves of `(args, kwargs)`, their structure, and a key of it that is fast to hash."""
    if not kwargs and all(type(arg) in _PLAIN for arg in args):
        return list(args), _flat_spec(len(args)), len(args)
    leaves, spec = tree_flatten((args, kwargs))
    return leaves, spec, spec


def take_apart(
    session: Session,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shown: str,
    loc: Location | None,
) -> Arguments:
    """Split the arguments of a call of `shown`. Torch functions must not be intercepted meanwhile.

    Args:
        session: the trace.
        args, kwargs: the arguments of the call.
        shown: the name of the called function, for messages.
        loc: the user's line.

    Raises:
        TraceError: an argument is a real tensor, an array, or an actor, or it hides a value of the
            step from the tracer.
    """
    leaves, spec, structure = flatten(args, kwargs)
    operands: list[Traced] = []
    keys: list[Any] = [structure]
    for leaf in leaves:
        if type(leaf) is TracedTensor or type(leaf) is ObjectValue:
            traced = session.use(leaf)
            operands.append(traced)
            keys.append(traced.spec)
        else:
            check_static(leaf, shown, loc)
            keys.append(static_key(leaf))
    return Arguments(operands, tuple(keys), leaves, spec)


def check_static(leaf: Any, shown: str, loc: Location | None) -> None:
    """Return if a leaf may be a static part of a call's signature.

    Raises:
        TraceError: the leaf's content may change without its signature, or the leaf is an actor, or
            holds a value of the step.
    """
    if type(leaf) in _PLAIN:
        return
    if isinstance(leaf, torch.nn.Parameter):
        raise TraceError(
            f"{shown} takes a parameter of a module, {show_type(leaf.dtype, leaf.shape)}, which is "
            "not a value of the step",
            loc=loc,
            remedy="use the parameter in a method of the actor that owns it",
        )
    if isinstance(leaf, torch.Tensor):
        unsupported = unsupported_library("")
        if unsupported is not None:
            raise TraceError(f"{shown} {unsupported.why}", loc=loc, remedy=unsupported.remedy)
        raise TraceError(
            f"{shown} takes a real tensor, {show_type(leaf.dtype, leaf.shape)}, which is not a "
            "value of the step",
            loc=loc,
            remedy="pass it to the step as an argument, make it in the step by a torch function "
            "such as torch.tensor, or keep it in an actor",
        )
    if isinstance(leaf, np.ndarray):
        raise TraceError(
            f"{shown} takes a numpy array of shape {leaf.shape}",
            loc=loc,
            remedy="pass it to the step as an argument, torch.from_numpy(array)",
        )
    if isinstance(leaf, NotAValue):
        raise TraceError(
            f"{shown} takes {leaf!r}, {leaf.what_it_is}",
            loc=loc,
            remedy="call its methods in the step, and pass on what they return",
        )
    if type(leaf) is slice and any(
        isinstance(part, torch.Tensor) for part in (leaf.start, leaf.stop, leaf.step)
    ):
        raise TraceError(
            f"{shown} takes a slice whose bounds are tensors; shapes are static in a compiled step",
            loc=loc,
            remedy="use Python integers as bounds, torch.index_select, or an actor's method that "
            "is marked @cg.opaque",
        )
    if any(isinstance(part, TracedTensor | ObjectValue) for part in _parts(leaf)):
        raise TraceError(
            f"{shown} takes a {type(leaf).__name__} that holds a value of the step, where the "
            "tracer does not see it",
            loc=loc,
            remedy="hand over the value itself, also in a tuple, list or dictionary; or register "
            "the class as a pytree, for example by torch.export.register_dataclass",
        )


def _parts(leaf: Any) -> list[Any]:
    """The leaves in a set, in an object's attributes, or in the closure of a function."""
    parts = list(leaf) if isinstance(leaf, set | frozenset | ValuesView | ItemsView) else []
    if not isinstance(leaf, type | torch.nn.Module):
        parts += vars(leaf).values() if hasattr(leaf, "__dict__") else ()
    for cell in getattr(leaf, "__closure__", None) or ():
        with suppress(ValueError):  # an empty cell
            parts.append(cell.cell_contents)
    return tree_leaves(parts)
