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

    Where a section is not measured, a whole backward takes the time of its halves, if they are, and
    halves share that of a whole one. Else the gradients of inputs take the time of the forward, and
    so do those of weights.

    Args:
        vjp: the derivative.
        work: of its forward.
        share: of that work, what the backward does again.
        costs: with the measured times of functions.
    """
    known = costs.functions
    forward = known.get(vjp.forward, costs.estimate(work))
    whole = known.get(vjp.backward)
    half = forward if whole is None else whole / 2
    if whole is None:
        halves = [known[name] for name in (vjp.input, vjp.weight) if name and name in known]
        whole = sum(halves) if len(halves) == 2 else 2 * forward
    times = {vjp.forward: forward, vjp.backward: whole + share * forward}
    if vjp.input is not None:
        times[vjp.input] = known.get(vjp.input, half) + share * forward
    if vjp.weight is not None and vjp.weight not in times:
        times[vjp.weight] = known.get(vjp.weight, half)
    return times
