"""A function tracer that remembers, since tracing takes most of the time of a small step.

Everything else of the compiler sees functions that were traced for it alone: they have the names
that it has asked for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from cg.ir.location import Location
from cg.tracer.functions import Functions
from cg.tracer.interface import MethodTarget, Target, TracedFunction, TracedVjp
from cg.tracer.specs import Tree


class SharedTraces:
    """Implements `FunctionTracer` by the real one; for actors that stay as they were traced."""

    def __init__(self) -> None:
        self._tracer = Functions()
        self._functions: dict[Any, TracedFunction] = {}
        self._vjps: dict[Any, TracedVjp] = {}

    def trace(
        self, target: Target, signature: Tree, name: str, loc: Location | None
    ) -> TracedFunction:
        """See `FunctionTracer`."""
        key = _key(target, signature)
        if key not in self._functions:
            self._functions[key] = self._tracer.trace(target, signature, name, loc)
        traced = self._functions[key]
        return replace(traced, declaration=replace(traced.declaration, name=name))

    def trace_vjp(
        self,
        target: Target,
        signature: Tree,
        name: str,
        grad_outputs: tuple[int, ...],
        grad_inputs: tuple[int, ...],
        loc: Location | None,
    ) -> TracedVjp:
        """See `FunctionTracer`."""
        key = (*_key(target, signature), grad_outputs, grad_inputs)
        if key not in self._vjps:
            self._vjps[key] = self._tracer.trace_vjp(
                target, signature, name, grad_outputs, grad_inputs, loc
            )
        made = self._vjps[key]
        forward, backward = f"{name}.forward", f"{name}.backward"
        return replace(
            made,
            vjp=replace(made.vjp, name=name, forward=forward, backward=backward),
            forward=replace(made.forward, name=forward),
            backward=replace(made.backward, name=backward),
        )


def _key(target: Target, signature: Tree) -> tuple[Any, ...]:
    if isinstance(target, MethodTarget):
        what: tuple[Any, ...] = (id(target.instance), target.actor, target.method)
    else:
        what = (target.callable, target.name)
    return (*what, signature, torch.is_grad_enabled())
