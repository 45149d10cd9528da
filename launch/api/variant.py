"""A step that has been compiled for one signature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...backends.failures.fallbacks import Fallbacks
from ...backends.program.linked import LinkedModule
from ...ir.location import Location
from ...ir.module import Module
from ...passes.manager import PassReport
from ...tracer.step.trace import Trace
from .fusing import Fused


@dataclass(frozen=True)
class Variant:
    """A step, compiled for one signature.

    Attributes:
        trace: of the step.
        module: scheduled.
        reports: what each pass did.
        fused: what its functions run.
        fallbacks: its graphs that are not replayed, as far as has been seen.
        loc: the step's first line.
    """

    trace: Trace
    module: Module
    reports: list[PassReport]
    fused: Fused
    fallbacks: Fallbacks
    loc: Location | None

    def linked(self, seed: int) -> LinkedModule:
        """The module, and what the ranks that this process plays run it with."""
        constants = self.trace.constants
        return LinkedModule(self.module, self.fused.bodies, constants, seed, self.fallbacks)

    @property
    def parameters(self) -> list[str]:
        """The names of the step's parameters, in order."""
        return [value.name for value in self.trace.module.program.params]

    def pick(self, driver: int) -> list[int] | None:
        """For each parameter of the driver's program its index among the step's; None if equal."""
        names = self.parameters
        mine = [value.name for value in self.module.program_of(driver).params]
        return None if mine == names else [names.index(name) for name in mine]

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The values of the step's parameters, if the actors are as they were traced."""
        self.trace.check_guards()
        return self.trace.inputs.flatten(args, kwargs)
