"""A call to trace, and the declared function that a step has called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
import torch.utils._pytree as pytree

from ...ir.attributes import Symbol
from ...ir.location import Location
from ...ir.module import Function
from ...ir.types import Place, Type, relocate
from ..actors.actor_state import ActorState
from ..heap.kinds import is_plain, is_walked
from ..step.specs import ObjectSpec, Static, TensorSpec, Tree
from .interface import Body, Target


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


VjpKey: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]


@dataclass(eq=False, slots=True)
class Callee:
    """A declared function of the step.

    Attributes:
        declaration: its entry in the module.
        results: the pytree that a call returns.
        state_outputs: indices of the outputs that are live references to the actor's state.
        signature: the pytree `(args, kwargs)` that it was traced with.
        target: what to trace; None if another process plays the actor.
        owner: the rank that traces it; None if every rank does.
        specs: the results that are values.
        needed: which of its operands require a gradient.
        differentiable: whether any of its results requires one.
        blocks_grad: whether plain Python would send gradients through it, which cg does not,
            because it is opaque.
        propagates_grad: whether a missing operand gradient makes the result's missing.
        may_accumulate: whether it may send gradients to its actor's parameters in plain Python,
            for all that is known, because it is opaque.
        symbol: its name, for ops.
        base: what the names of its results derive from.
        is_single: whether its result is one value and nothing else.
        shares: whether its results may share memory with anything.
        views: pairs (result, operand) that may share memory in plain Python.
        vjps: its derivatives so far, by masks of outputs and inputs, and by the functions that
            may write to its actor between forward and backward.
        strict_body: of an opaque function, a body that raises where a result requires a gradient;
            None where it cannot run.
        strict: the name by which that body is in the module, once it is.
    """

    declaration: Function
    results: Tree
    state_outputs: tuple[int, ...]
    signature: Tree
    target: Target | None
    owner: int | None
    specs: tuple[TensorSpec | ObjectSpec, ...]
    needed: tuple[bool, ...]
    differentiable: bool
    blocks_grad: bool
    propagates_grad: bool
    may_accumulate: bool
    symbol: Symbol
    base: str
    is_single: bool
    shares: bool
    views: tuple[tuple[int, int], ...]
    vjps: dict[VjpKey, Symbol] = field(default_factory=dict)
    strict_body: Body | None = None
    strict: Symbol | None = None
    _types: dict[Place, tuple[Type, ...]] = field(default_factory=dict)

    def types_at(self, place: Place) -> tuple[Type, ...]:
        """The types of the results of a call at `place`."""
        types = self._types.get(place)
        if types is None:
            types = tuple(relocate(type_, place) for type_ in self.declaration.outputs)
            self._types[place] = types
        return types


def value_leaves(tree: Tree) -> tuple[TensorSpec | ObjectSpec, ...]:
    """The specs of the leaves that are values, in order."""
    return tuple(cast("TensorSpec | ObjectSpec", tree.leaves[i]) for i in tree.values)


def requires_grad(spec: TensorSpec | ObjectSpec) -> bool:
    """True if gradients flow through a value."""
    return isinstance(spec, TensorSpec) and spec.requires_grad
