"""A function that the step has called, and all that another call of it needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias, cast

from ...ir.attributes import Symbol
from ...ir.module import Function
from ...ir.types import Place, Type, relocate
from ..step.specs import ObjectSpec, TensorSpec, Tree
from .interface import Body, Target

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
        cuts: whether plain Python would send gradients through it, which cg does not, because it
            is opaque.
        passes_on: whether a gradient that an operand lacks is one that its results lack.
        hides: whether it may send gradients to its actor's parameters in plain Python, for all
            that is known, because it is opaque.
        symbol: its name, for ops.
        base: what the names of its results derive from.
        is_single: whether its result is one value and nothing else.
        shares: whether its results may share memory with anything.
        views: pairs (result, operand) that may share memory in plain Python.
        vjps: its derivatives so far, by masks of outputs and inputs, and by the functions that
            may write to its actor between forward and backward.
        strict_body: of an opaque function, see `TracedFunction.strict`; None where it cannot run.
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
    cuts: bool
    passes_on: bool
    hides: bool
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
    """Whether gradients flow through a value."""
    return isinstance(spec, TensorSpec) and spec.requires_grad
