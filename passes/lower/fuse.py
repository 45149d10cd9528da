"""Mark the functions that are compiled as a whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ...ir.ops.module import Function, FunctionKind, Module
from ...ir.phases import Phase
from ..base import Pass


@dataclass(frozen=True)
class Fuse(Pass):
    """Mark the functions whose graphs a compiler turns into fused kernels.

    Only `compile(fuse=...)` runs it. It leaves out opaque methods, operators of the step outside of
    actors, and functions that draw random numbers, as these could draw other numbers if fused. The
    backward of such a function draws none, so it is fused.

    Before::

        function @a.forward(f32[8]) -> (f32[8]) {actor = a, effect = read}

    After::

        function @a.forward(f32[8]) -> (f32[8]) {actor = a, effect = read, fuse = inductor}

    Attributes:
        by: the name of the compiler.
    """

    by: str = ""

    name: ClassVar[str] = "fuse"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.SCHEDULED,)
    optional: ClassVar[bool] = True

    def run(self, module: Module) -> bool:
        changed = False
        for name, function in module.functions.items():
            if self.by and function.fuse is None and refusal(function) is None:
                module.functions[name] = replace(function, fuse=self.by)
                changed = True
        return changed


def refusal(function: Function) -> str | None:
    """The reason why a function is not compiled as a whole, in words; None if it may be."""
    if function.kind is FunctionKind.OPAQUE:
        return "it is opaque"
    if function.kind is FunctionKind.HOST:
        return "it is the host's"
    if function.kind is FunctionKind.BUILTIN:
        return "it is built in"
    if function.actor is None:
        return "it is a single operator of the step"
    return "it draws random numbers" if function.random else None
