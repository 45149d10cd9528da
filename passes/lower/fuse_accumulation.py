"""Let products add themselves to gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ...ir.attributes import Effect
from ...ir.ops.module import FunctionKind, Module
from ...ir.phases import Phase
from ..base import Pass


@dataclass(frozen=True)
class FuseAccumulation(Pass):
    """Mark the functions that accumulate gradients, so that matrix products add up by themselves.

    A gradient that is a matrix product is then no tensor of its own, which would be written, read
    and added to `.grad`: the product adds to `.grad` what it computes. Megatron-LM calls that
    gradient accumulation fusion. Sums are rounded once for each product and not twice, so they may
    differ from those of autograd in the last bit; without this pass they do not.

    Before::

        function @a.forward.vjp.backward(f32[8,8], f32[8,8]) -> (f32[8,8]) {actor = a,
            effect = accumulate, kind = graph}

    After::

        function @a.forward.vjp.backward(f32[8,8], f32[8,8]) -> (f32[8,8]) {actor = a,
            adds_products = true, effect = accumulate, kind = graph}
    """

    name: ClassVar[str] = "fuse-accumulation"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.SCHEDULED,)
    optional: ClassVar[bool] = True

    def run(self, module: Module) -> bool:
        changed = False
        for name, function in module.functions.items():
            accumulates = function.effect is Effect.ACCUMULATE
            if accumulates and function.kind is FunctionKind.GRAPH and not function.adds_products:
                module.functions[name] = replace(function, adds_products=True)
                changed = True
        return changed
