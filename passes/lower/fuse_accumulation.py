"""Let matrix products add themselves to gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ...ir.attributes import Effect
from ...ir.ops.module import FunctionKind, Module
from ...ir.phases import Phase
from ..base import Pass


@dataclass(frozen=True)
class FuseAccumulation(Pass):
    """Mark functions that accumulate gradients, so that matrix products add to `.grad` themselves.

    Without the mark, a gradient that is a matrix product is a tensor of its own, which is written,
    read and added to `.grad`. With it, the product adds its result to `.grad` directly. Megatron-LM
    calls this gradient accumulation fusion. Sums are rounded once for each product instead of
    twice, so they may differ from those of autograd in the last bit.

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
