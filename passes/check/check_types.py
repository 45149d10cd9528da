"""Verify a module as a step of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...ir.ops.module import Module
from ...ir.phases import Phase
from ...ir.verify.verifier import verify
from ..base import Pass


@dataclass(frozen=True)
class CheckTypes(Pass):
    """Refuse a module that breaks a rule of its phase; change nothing.

    The manager verifies after passes, unless it is told not to. With this pass in the pipeline, the
    finished programs are verified in any case.

    Refused, for instance::

        %a = call(%x) {fn = @stage0.forward} : f32[4,8]@0

    where `@stage0.forward` returns `f32[2,8]`.
    """

    name: ClassVar[str] = "check-types"
    requires: ClassVar[tuple[Phase, ...]] = tuple(Phase)

    def run(self, module: Module) -> bool:
        verify(module)
        return False
