"""A function tracer that remembers, since tracing takes most of the time of a small step.

Everything else of the compiler sees functions that were traced for it alone: they have the names
that it has asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from cg.backends.base import Body
from cg.ir.location import Location
from cg.tracer.function.functions import Functions
from cg.tracer.graph.codegen.bodies import GraphBody, each_body
from cg.tracer.values.interface import (
    Bodies,
    MethodTarget,
    Target,
    TracedFunction,
    TracedPart,
    TracedVjp,
    Write,
)
from cg.tracer.values.specs import Tree


class SharedTraces:
    """A `FunctionTracer` that traces each method once; for actors that stay as they were traced."""

    def __init__(self) -> None:
        self._tracer = Functions()
        self._functions: dict[Any, TracedFunction] = {}
        self._vjps: dict[Any, TracedVjp] = {}

    def trace(
        self, target: Target, signature: Tree, name: str, loc: Location | None
    ) -> TracedFunction:
        """Trace with the real one, or remember."""
        key = _key(target, signature)
        if key not in self._functions:
            made = self._tracer.trace(target, signature, name, loc)
            self._functions[key] = replace(made, body=_remembering(made.body))
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
        between: Sequence[Write] = (),
    ) -> TracedVjp:
        """Trace with the real one, or remember."""
        # Functions have other names in each trace, so all writes are taken for opaque ones, which
        # the run has to look for.
        key = (*_key(target, signature), grad_outputs, grad_inputs, bool(between))
        if key not in self._vjps:
            unknown = [replace(write, function=f"? {write.function}") for write in between]
            new = self._tracer.trace_vjp(
                target, signature, name, grad_outputs, grad_inputs, loc, unknown
            )
            self._vjps[key] = replace(
                new,
                first=_part(new.first),
                second=_part(new.second),
                halves=tuple(map(_part, new.halves)),
            )
        made = self._vjps[key]
        old = made.vjp.name

        def renamed(part: TracedPart) -> TracedPart:
            function = part.declaration
            declaration = replace(function, name=_rename(function.name, old, name))
            return replace(part, declaration=declaration)

        vjp = made.vjp
        return replace(
            made,
            vjp=replace(
                vjp,
                name=name,
                forward=_rename(vjp.forward, old, name),
                backward=_rename(vjp.backward, old, name),
                input=vjp.input and _rename(vjp.input, old, name),
                weight=vjp.weight and _rename(vjp.weight, old, name),
            ),
            first=renamed(made.first),
            second=renamed(made.second),
            halves=tuple(map(renamed, made.halves)),
        )


def _part(part: TracedPart) -> TracedPart:
    return replace(part, body=_remembering(part.body))


def _remembering(body: Bodies | None) -> Bodies | None:
    """A body whose code is generated once for each form that compilations ask for."""

    def with_memory(each: Body) -> Body:
        return replace(each, refit=cache(each.refit)) if isinstance(each, GraphBody) else each

    return None if body is None else each_body(body, with_memory)


def _rename(function: str, old: str, new: str) -> str:
    return new + function.removeprefix(old)


def _key(target: Target, signature: Tree) -> tuple[Any, ...]:
    if isinstance(target, MethodTarget):
        what: tuple[Any, ...] = (id(target.instance), target.actor, target.method, target.remat)
    else:
        what = (target.callable, target.name)
    return (*what, signature, torch.is_grad_enabled())
