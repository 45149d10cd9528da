"""Find how little forwards must save for each rank's program to keep to its limit of memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from ...ir.ops.module import Module, Vjp
from ...ir.pipeline.costs import Costs
from ...ir.pipeline.tradeoff import Tradeoff
from ..simulate.memory_plan import MemoryPlan, memory_plan
from .choice_times import choice_time
from .parameter_reads import rests
from .saving_levels import NO_HOSTS, HostMemory, SavingLevels, saving_levels

Limits = Mapping[str, int]
"""The most bytes that forwards save, by the name of the derivative."""

Amounts = Mapping[int, int]
"""How much moves to hosts, by rank, as in `Offload`; 0 where a rank is missing."""

Compiled = Callable[[Limits, frozenset[int], Amounts], Module]
"""Compiles a step with limits, with whole backwards on some ranks, and with moves to hosts."""

SHARES = tuple(Fraction(quarter, 4) for quarter in range(5))
"""The choices that all forwards share, as shares of the way to save the least."""

_PARTS = 8
"""The parts in which levels are tried where the last one does not fit."""


class MemoryLimitError(ValueError):
    """A rank's program does not keep to its limit.

    Attributes:
        reason: by how much, on which rank, at which op, and what the least is.
        remedy: what to do.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason, self.remedy = reason, remedy
        super().__init__(f"{reason}; {remedy}")


@dataclass(frozen=True)
class Fit:
    """Limits of forwards with which all programs keep to the limits of their ranks.

    Attributes:
        limits: the limits; empty if the programs keep to them anyway.
        amounts: how much moves to hosts.
        whole: the ranks whose backwards are not split.
        report: for users: a line for each rank and forward.
    """

    limits: Limits
    amounts: Amounts
    whole: frozenset[int]
    report: str

    @property
    def is_plain(self) -> bool:
        """True if all is saved where it is computed."""
        return not (self.limits or self.whole or any(self.amounts.values()))


NO_LIMIT = Fit({}, {}, frozenset(), "")
"""What a step is compiled with that may hold all that it saves."""


def fit(
    vjps: Mapping[str, Vjp],
    tradeoffs: Mapping[str, Tradeoff],
    memory: Sequence[int],
    compiled: Compiled,
    may_be_whole: bool,
    hosts: HostMemory = NO_HOSTS,
) -> Fit:
    """Choose limits with as little work as keeps each rank to its memory.

    Ranks search side by side, each by bisection over its levels (`saving_levels`), and each trial
    is compiled as a whole: what messages, gathered parameters and the work inside of calls take is
    counted as it is. Inside of a backward, what it computes again takes memory, too. So where the
    last level does not fit, the ones before it are tried in equal parts.

    Prices know the work of a rank, and neither which rank others wait for nor when the link is
    free. So a choice that moves something is compared on paper with the best that only computes
    again, and with the best that only moves; with several groups of ranks also with those that all
    forwards share. The fastest wins, and of equals the one that moves the least.

    Nothing computes again what B leaves to W. So the backwards of ranks that nothing else helps
    stay whole, and all search anew.

    Args:
        vjps: the derivatives of the traced module.
        tradeoffs: the choices of each derivative that has any.
        memory: the limit of each rank, in bytes.
        compiled: compiles the step.
        may_be_whole: whether backwards that are split may be whole on some ranks.
        hosts: the memory of hosts, where tensors may rest.

    Raises:
        MemoryLimitError: nothing that was tried fits.
    """
    trials = _Trials(compiled)
    plans = trials.plans(_MemoryChoice({}, {}))
    if all(plan.peak <= limit for plan, limit in zip(plans, memory, strict=True)):
        return Fit({}, {}, trials.whole, _report(plans, memory, {}, tradeoffs, []))
    while True:
        groups = saving_levels(trials.plain(), vjps, tradeoffs, hosts)
        joint = _search(groups, memory, trials)
        candidates = [joint]
        if joint.moves:
            staying = saving_levels(trials.plain(), vjps, tradeoffs, hosts.without_moves())
            candidates.append(_search(staying, memory, trials))
            candidates.append(_search([g.moving() for g in groups], memory, trials))
        if len(groups) > 1:
            moves = (joint.amounts, {}) if joint.moves else ({},)
            candidates += [_MemoryChoice(limits, a) for limits in _shared(tradeoffs) for a in moves]
        fitting = [choice for choice in candidates if not _over(trials.plans(choice), memory)]
        if fitting:
            times = partial(_time, vjps, tradeoffs, hosts.costs, trials)
            best = min(fitting, key=times) if len(fitting) > 1 else fitting[0]
            plans = trials.plans(best)
            report = _report(plans, memory, best.limits, tradeoffs, groups, trials.whole)
            return Fit(best.limits, best.amounts, trials.whole, report)
        plans = trials.plans(joint)
        over = _over(plans, memory)
        # Ranks of a mesh compute the same functions.
        over |= {rank for group in groups if over & set(group.ranks) for rank in group.ranks}
        if not may_be_whole or over <= trials.whole:
            raise _error(plans, memory, trials)
        trials.whole |= over


@dataclass(frozen=True)
class _MemoryChoice:
    """The limits of forwards, and the amounts that move to hosts."""

    limits: Limits
    amounts: Amounts

    @property
    def moves(self) -> bool:
        """True if something may move."""
        return any(self.amounts.values())


def _over(plans: Sequence[MemoryPlan], memory: Sequence[int]) -> set[int]:
    """The ranks that do not keep to their limits."""
    return {rank for rank, plan in enumerate(plans) if plan.peak > memory[rank]}


class _Trials:
    """The memory of compiled trials.

    Attributes:
        whole: the ranks whose backwards are not split.
    """

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._plain: dict[frozenset[int], Module] = {}
        self._plans: dict[tuple[object, ...], list[MemoryPlan]] = {}
        self.whole: frozenset[int] = frozenset()

    def plain(self) -> Module:
        """The module without limits."""
        if self.whole not in self._plain:
            self._plain[self.whole] = self._compiled({}, self.whole, {})
        return self._plain[self.whole]

    def module(self, choice: _MemoryChoice) -> Module:
        """The module of a trial."""
        if not choice.limits and not choice.moves:
            return self.plain()
        return self._compiled(choice.limits, self.whole, choice.amounts)

    def plans(self, choice: _MemoryChoice) -> list[MemoryPlan]:
        """The memory of each rank."""
        amounts = (item for item in choice.amounts.items() if item[1])
        key = (self.whole, *sorted(choice.limits.items()), *sorted(amounts))
        if key not in self._plans:
            module = self.module(choice)
            self._plans[key] = [memory_plan(module, rank) for rank in range(module.world)]
        return self._plans[key]

    def least(self, rank: int) -> MemoryPlan:
        """The memory of a rank in the trial in which it holds the least."""
        return min((plans[rank] for plans in self._plans.values()), key=lambda plan: plan.peak)


def _at(groups: Sequence[SavingLevels], level: Sequence[int]) -> _MemoryChoice:
    """The choice on levels of groups."""
    limits: dict[str, int] = {}
    amounts: dict[int, int] = {}
    for group, index in zip(groups, level, strict=True):
        limits.update(group.limits[index])
        amounts.update(dict.fromkeys(group.ranks, group.amounts[index]))
    return _MemoryChoice(limits, amounts)


def _shared(tradeoffs: Mapping[str, Tradeoff]) -> Iterator[Limits]:
    """The limits that all forwards share, as shares of the way to save the least."""
    for share in SHARES:
        points = {
            name: t.points[round(share * (len(t.points) - 1))] for name, t in tradeoffs.items()
        }
        yield {name: point.saved for name, point in points.items()}


def _time(
    vjps: Mapping[str, Vjp],
    tradeoffs: Mapping[str, Tradeoff],
    costs: Costs,
    trials: _Trials,
    choice: _MemoryChoice,
) -> tuple[float, int]:
    """The time of a choice on paper, in milliseconds, and the bytes that move."""
    moved = sum(plan.moved for plan in trials.plans(choice))
    module = trials.module(choice)
    return choice_time(module, vjps, tradeoffs, choice.limits, costs), moved


def _search(
    groups: Sequence[SavingLevels], memory: Sequence[int], trials: _Trials
) -> _MemoryChoice:
    """The choice on the first levels of groups that fit, or on those that hold the least."""
    level = _bisect(groups, memory, trials)
    plans = trials.plans(_at(groups, level))
    stuck = [group for group in groups if not _fits(group, plans, memory)]
    return _at(groups, _scan(groups, stuck, level, memory, trials) if stuck else level)


def _fits(group: SavingLevels, plans: Sequence[MemoryPlan], memory: Sequence[int]) -> bool:
    return all(plans[rank].peak <= memory[rank] for rank in group.ranks)


def _bisect(groups: Sequence[SavingLevels], memory: Sequence[int], trials: _Trials) -> list[int]:
    """The first level of each group that fits, or the last, if less is held on later levels."""
    low = [-1] * len(groups)  # known not to fit
    high = [group.last for group in groups]
    trial = [0] * len(groups)
    while any(b - a > 1 for a, b in zip(low, high, strict=True)):
        plans = trials.plans(_at(groups, trial))
        for index, group in enumerate(groups):
            if high[index] - low[index] > 1:
                (high if _fits(group, plans, memory) else low)[index] = trial[index]
            is_open = high[index] - low[index] > 1
            trial[index] = (high[index] + low[index]) // 2 if is_open else high[index]
    return high


def _scan(
    groups: Sequence[SavingLevels],
    stuck: Sequence[SavingLevels],
    level: Sequence[int],
    memory: Sequence[int],
    trials: _Trials,
) -> list[int]:
    """Levels in which those groups that are stuck fit, or hold the least of what is tried."""
    best = list(level)
    peaks: dict[int, int] = {}
    for part in range(_PARTS + 1):
        tried = [
            group.last * part // _PARTS if group in stuck else index
            for group, index in zip(groups, level, strict=True)
        ]
        plans = trials.plans(_at(groups, tried))
        for number, group in enumerate(groups):
            excess = max(0, *(plans[rank].peak - memory[rank] for rank in group.ranks))
            if group in stuck and (number not in peaks or excess < peaks[number]):
                peaks[number], best[number] = excess, tried[number]
    return best


def _error(plans: Sequence[MemoryPlan], memory: Sequence[int], trials: _Trials) -> MemoryLimitError:
    excess = [trials.least(rank).peak - limit for rank, limit in enumerate(memory)]
    if max(excess) <= 0:  # each rank fits in some trial, but not all in one
        excess = [plan.peak - limit for plan, limit in zip(plans, memory, strict=True)]
    rank = excess.index(max(excess))
    plan = trials.least(rank)
    name, size = plan.largest
    return MemoryLimitError(
        f"memory= allows {memory[rank]:,} bytes on rank {rank}, and the least that its program "
        f"was found to hold is {plan.peak:,}, at {plan.at}, {excess[rank]:,} too many. There "
        f"values hold {plan.working - plan.inside:,} bytes, of which %{name} is the largest with "
        f"{size:,}, the call holds {plan.inside:,} inside, and slots and inputs hold "
        f"{plan.slots + plan.inputs:,}",
        "give more memory, smaller or fewer microbatches in flight, or more stages; "
        + (_RESTING if rests(trials.plain(), rank) else _STAYING),
    )


_STAYING = (
    'actors with store="host" leave the device their parameters and what their optimizers keep, '
    "which memory= does not count"
)
_RESTING = (
    "make layers actors of their own, as an update brings all that an actor trains to the device"
)


def _report(
    plans: Sequence[MemoryPlan],
    memory: Sequence[int],
    limits: Limits,
    tradeoffs: Mapping[str, Tradeoff],
    groups: Sequence[SavingLevels],
    whole: Collection[int] = (),
) -> str:
    lines = []
    for rank, (plan, limit) in enumerate(zip(plans, memory, strict=True)):
        lines.append(f"rank {rank}: {plan.peak:,} of {limit:,} bytes, at {plan.at or 'its start'}")
        if plan.moved:
            lines.append(
                f"  moves {plan.moved:,} bytes to its host and back, through {plan.host:,} bytes "
                "of pinned memory"
            )
        if rank in whole:
            lines.append("  backwards stay whole, as what B leaves to W cannot be computed again")
        for group in groups:
            for name in sorted(group.limits[-1]) if rank in group.ranks else ():
                tradeoff = tradeoffs[name]
                point = tradeoff.within(limits.get(name, tradeoff.most))
                share = 100 * tradeoff.share_within(limits.get(name, tradeoff.most))
                lines.append(
                    f"  @{name}: saves {point.saved:,} of {tradeoff.most:,} bytes, and computes "
                    f"{share:.1f} % of the forward again"
                )
    return "\n".join(lines)
