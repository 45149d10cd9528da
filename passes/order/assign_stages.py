"""Label the forward work of every microbatch with its cell of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...ir.module import Module, Phase
from ..base import Pass
from .stages import label


@dataclass(frozen=True)
class AssignStages(Pass):
    """Cut the step into stages, and label each forward call with stage and microbatch.

    A stage is a maximal run of one actor's work in a microbatch. `differentiate` labels the
    backward of a call with the same stage; `schedule` orders the work by these labels.

    Before::

        %h = call(%x) {fn = @stage0.forward, mb = 0} : f32[2,8]@0
        %l = call(%h) {fn = @stage1.loss, mb = 0} : f32[]@1

    After::

        %h = call(%x) {fn = @stage0.forward, mb = 0, task = 0F0} : f32[2,8]@0
        %l = call(%h) {fn = @stage1.loss, mb = 0, task = 1F0} : f32[]@1
    """

    name: ClassVar[str] = "assign-stages"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.TRACED,)

    def run(self, module: Module) -> bool:
        return label(module)
