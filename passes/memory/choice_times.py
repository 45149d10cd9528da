"""The time of a step on paper with what its backwards compute again, and what its ranks move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from ...ir.ops.module import Module, Vjp
from ...ir.pipeline.costs import Costs
from ...ir.pipeline.tradeoff import Tradeoff
from ..simulate.program_simulator import simulate_programs


def choice_time(
    module: Module,
    vjps: Mapping[str, Vjp],
    tradeoffs: Mapping[str, Tradeoff],
    limits: Mapping[str, int],
    costs: Costs,
) -> float:
    """The makespan of a scheduled module, in milliseconds, to nine digits.

    Args:
        module: compiled with the limits.
        vjps: the derivatives of the traced module.
        tradeoffs: the choices of each derivative that has any.
        limits: the most bytes that forwards save, by derivative.
        costs: the times of functions, where they are measured, and of messages.
    """
    functions = dict(costs.functions)
    for name, tradeoff in tradeoffs.items():
        share = tradeoff.share_within(limits.get(name, tradeoff.most))
        functions.update(section_times(vjps[name], tradeoff.work, share, costs))
    costs = replace(costs, functions=functions, tf=0, tb=0, tw=0)
    return simulate_programs(module, costs).comparable_makespan


def work_time(vjp: Vjp, tradeoff: Tradeoff, costs: Costs) -> Fraction:
    """The milliseconds of a unit of a forward's work: measured, or those of an accelerator.

    A forward that ranks of a mesh compute in parts takes the time of all its parts.
    """
    parts = [
        time
        for name, time in costs.functions.items()
        if name == vjp.forward or name.startswith(f"{vjp.forward}.part")
    ]
    if not parts or not tradeoff.work:
        return Fraction(costs.estimate(1))
    return Fraction(sum(parts)) / tradeoff.work


def section_times(vjp: Vjp, work: int, share: float, costs: Costs) -> Mapping[str, float]:
    """The milliseconds of the sections of a derivative.

    Where a section is not measured, the gradients of inputs take the time of the forward, and so do
    those of weights.

    Args:
        vjp: the derivative.
        work: of its forward.
        share: of that work, what the backward does again.
        costs: with the measured times of functions.
    """
    forward = costs.functions.get(vjp.forward, costs.estimate(work))
    times = {vjp.forward: forward}
    for name, runs in ((vjp.backward, 2), (vjp.input, 1)):
        if name is not None:
            times[name] = costs.functions.get(name, runs * forward) + share * forward
    if vjp.weight is not None and vjp.weight not in times:
        times[vjp.weight] = costs.functions.get(vjp.weight, forward)
    return times
