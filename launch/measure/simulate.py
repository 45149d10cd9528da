"""Runs a compiled step on paper, with costs that are given or read from a file."""

from __future__ import annotations

from pathlib import Path

from ...ir.module import Module
from ...ir.pipeline.costs import Costs
from ...passes.simulate.program_simulator import ProgramSimulation, simulate_programs


def simulate(module: Module, costs: Costs | Path | str | None) -> ProgramSimulation:
    """See `Compiled.simulate`.

    Raises:
        OSError: the file cannot be read.
        TypeError: `costs` are something else.
        ValueError: the file does not hold costs, or the costs are for fewer stages.
    """
    if isinstance(costs, Path | str):
        costs = Costs.load(costs)
    if costs is not None and not isinstance(costs, Costs):
        raise TypeError(
            f"costs are {type(costs).__name__}; simulate() takes cg.Costs (what cg.measure() "
            "gives), the name of a file that Costs.save() has written, or None"
        )
    return simulate_programs(module, Costs() if costs is None else costs)
