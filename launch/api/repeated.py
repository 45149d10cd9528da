"""Run a compiled step several times, to record it or to measure its costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...backends.base import World
from ...ir.ops.module import Module
from ...ir.pipeline.costs import Costs
from ..measure.calibration import measured_costs
from ..measure.recording import RecordedTimes

Run = Callable[[tuple[Any, ...], dict[str, Any], int], tuple[Module, list[RecordedTimes]]]
"""Runs a step on all ranks, given its arguments and a count; returns module and recordings."""


class Repeated:
    """A compiled step, and how often it is to run.

    All arguments of its methods are the step's, whatever their names are.

    Attributes:
        executions: how often.
    """

    def __init__(self, executions: int, run: Run, world: World) -> None:
        if not isinstance(executions, int) or isinstance(executions, bool):
            raise TypeError(f"executions={executions!r}: it is how often the step runs, an int")
        if executions < 1:
            raise ValueError(f"executions={executions}: there must be at least 1")
        self.executions = executions
        self._run = run
        self._world = world

    def record(self, /, *args: Any, **kwargs: Any) -> list[RecordedTimes]:
        """Record each execution, as `Compiled.record` does."""
        return self._run(args, kwargs, self.executions)[1]

    def measure(self, /, *args: Any, **kwargs: Any) -> Costs:
        """Measure the costs, as `cg.measure` does."""
        # The first execution finds cold caches and makes gradients that later ones add to.
        module, (_, *recordings) = self._run(args, kwargs, self.executions + 1)
        return measured_costs(self._world, module, recordings)
