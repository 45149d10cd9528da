"""The levels on which forwards of some ranks save less and less, by one price of a byte for all.

Ranks that share a forward decide together, as the ranks of a mesh do; other ranks each by
themselves. A byte of a forward counts as often as microbatches hold it at once on a rank, and work
as often as it is done. So an early stage of a pipeline, which holds many microbatches, saves less
of each than a late one.

A price is in milliseconds. Where the forward of a derivative has been measured, its work takes that
time, and else that of an accelerator.

On a rank with a device, tensors may also rest on its host. A byte that moves has the price of two
copies in the device's memory: computing again what costs less comes first, such as sums and norms.
Where the copies are not done while a tensor rests, the time of the link comes on top. The link is
one for the whole step, so `Offload` says how many tensors it carries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

from ...ir.flops import WORK_OF_COPIED_BYTE
from ...ir.ops import Call
from ...ir.ops.module import Module, Vjp
from ...ir.pipeline.costs import Costs
from ...ir.pipeline.tradeoff import SavingPoint, Tradeoff
from .choice_times import work_time
from .offload import ALL, HIDDEN


@dataclass(frozen=True)
class SavingLevels:
    """The levels of some ranks.

    Attributes:
        ranks: the ranks.
        limits: for each level the most bytes that forwards save, by derivative. Level 0 has no
            limits; on the last each forward saves as little as it can.
        amounts: for each level how much moves to hosts, as in `Offload`.
    """

    ranks: tuple[int, ...]
    limits: tuple[Mapping[str, int], ...]
    amounts: tuple[int, ...]

    @property
    def last(self) -> int:
        return len(self.limits) - 1

    def moving(self) -> SavingLevels:
        """Levels on which more and more moves to hosts, and nothing is computed again."""
        return SavingLevels(self.ranks, ({},) * (ALL + 1), tuple(range(ALL + 1)))


@dataclass(frozen=True)
class HostMemory:
    """The hosts' memory, beside devices.

    Attributes:
        ranks: the ranks with a device.
        costs: the times of functions, and the link between a device and its host.
    """

    ranks: frozenset[int] = frozenset()
    costs: Costs = field(default_factory=Costs)

    @property
    def load(self) -> Fraction:
        """The milliseconds for which a byte occupies the device on its way to the host and back."""
        return 2 * Fraction(self.costs.estimate(WORK_OF_COPIED_BYTE))

    @property
    def price(self) -> Fraction:
        """The milliseconds that a byte costs if nothing hides its way to the host and back."""
        return self.load + 2 * Fraction(self.costs.host.time(1 << 30)) / (1 << 30)

    def without_moves(self) -> HostMemory:
        """The same costs where nothing may move."""
        return HostMemory(costs=self.costs)


NO_HOSTS = HostMemory()


def saving_levels(
    module: Module,
    vjps: Mapping[str, Vjp],
    tradeoffs: Mapping[str, Tradeoff],
    hosts: HostMemory = NO_HOSTS,
) -> list[SavingLevels]:
    """The levels of all ranks that run forwards with a choice.

    Args:
        module: scheduled, without limits.
        vjps: the derivatives of the traced module.
        tradeoffs: the choices of each derivative that has any, by its name.
        hosts: the memory that tensors may move to.
    """
    sections = _sections(vjps, tradeoffs)
    uses = {rank: _uses(module, rank, sections) for rank in range(module.world)}
    groups: list[tuple[set[int], set[str]]] = []
    for rank, of_rank in uses.items():
        if not of_rank:
            continue
        joined, names = {rank}, set(of_rank)
        for group in [g for g in groups if g[1] & names]:
            groups.remove(group)
            joined |= group[0]
            names |= group[1]
        groups.append((joined, names))
    levels = []
    for ranks, names in groups:
        most = {
            name: max(uses[rank].get(name, _ForwardUse(0, 0)) for rank in ranks)
            for name in sorted(names)
        }
        prices = (hosts.load, hosts.price) if hosts.ranks >= ranks else None
        times = {name: work_time(vjps[name], tradeoffs[name], hosts.costs) for name in most}
        levels.append(SavingLevels(tuple(sorted(ranks)), *_levels(most, tradeoffs, times, prices)))
    return sorted(levels, key=lambda level: level.ranks)


@dataclass(frozen=True, order=True)
class _ForwardUse:
    """The microbatches that hold what a forward saves at once, and the calls of the forward."""

    held: int
    calls: int


def _uses(
    module: Module, rank: int, sections: Mapping[str, _CalledSection]
) -> Mapping[str, _ForwardUse]:
    """How a rank uses forwards, by derivative."""
    calls: Counter[str] = Counter()
    held: Counter[str] = Counter()
    most: Counter[str] = Counter()
    names = [op.fn.name for op in module.program_of(rank).ops if isinstance(op, Call)]
    # Of a function that is cut where ranks exchange something, the first part stands for all.
    called = [sections[first] for name in names if (first := name.split(".part0")[0]) in sections]
    puts_off = {section.vjp for section in called if section.is_weight}
    for section in called:
        if section.is_forward:
            calls[section.vjp] += 1
            held[section.vjp] += 1
            most[section.vjp] = max(most[section.vjp], held[section.vjp])
        elif section.is_weight or section.vjp not in puts_off:
            held[section.vjp] -= 1
    return {name: _ForwardUse(most[name], count) for name, count in calls.items()}


@dataclass(frozen=True)
class _CalledSection:
    """A function of a derivative: its forward, its backward, or a half of that."""

    vjp: str
    is_forward: bool
    is_weight: bool


def _sections(
    vjps: Mapping[str, Vjp], tradeoffs: Mapping[str, Tradeoff]
) -> dict[str, _CalledSection]:
    """The functions of derivatives that have a choice, by name."""
    sections: dict[str, _CalledSection] = {}
    for name in tradeoffs:
        vjp = vjps[name]
        for function in (vjp.backward, vjp.input):
            if function is not None:
                sections[function] = _CalledSection(name, False, False)
        if vjp.weight is not None:
            sections[vjp.weight] = _CalledSection(name, False, True)
        sections[vjp.forward] = _CalledSection(name, True, False)
    return sections


def _levels(
    uses: Mapping[str, _ForwardUse],
    tradeoffs: Mapping[str, Tradeoff],
    times: Mapping[str, Fraction],
    moving: tuple[Fraction, Fraction] | None,
) -> tuple[tuple[Mapping[str, int], ...], tuple[int, ...]]:
    """The limits and amounts of each level: one step of the least price after the other.

    A step goes down the hull of some derivative, or moves more. One over points above the hull is
    taken in parts, which serve where the whole is too much.

    Args:
        uses: of each derivative.
        tradeoffs: of each derivative.
        times: the milliseconds of a unit of the work of each.
        moving: the prices of a byte that moves, if its copies are done while it rests, and if not;
            None where nothing may move.
    """
    steps: list[tuple[Fraction, str, Sequence[int]]] = []
    if moving is not None:
        often = max(Fraction(use.calls, max(1, use.held)) for use in uses.values())
        hidden, late = moving
        steps.append((hidden * often, "", range(1, HIDDEN + 1)))
        steps.append((late * often, "", range(HIDDEN + 1, ALL + 1)))
    for name, use in uses.items():
        points = tradeoffs[name].points
        for more, less in pairwise(_hull(points)):
            spared = max(1, use.held) * (more.saved - less.saved)
            price = times[name] * Fraction(use.calls * (less.again - more.again), spared)
            between = [p.saved for p in points if less.saved <= p.saved < more.saved]
            steps.append((price, name, between))
    limits: list[Mapping[str, int]] = [{}]
    amounts = [0]
    for _, name, parts in sorted(steps, key=lambda step: step[0]):
        for part in parts:
            limits.append({**limits[-1], name: part} if name else limits[-1])
            amounts.append(amounts[-1] if name else part)
    return tuple(limits), tuple(amounts)


def _hull(points: Sequence[SavingPoint]) -> list[SavingPoint]:
    """The points of the lower convex hull: each byte spared costs more than those before."""
    hull: list[SavingPoint] = []
    for point in points:
        while len(hull) > 1 and not _is_below(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _is_below(first: SavingPoint, middle: SavingPoint, last: SavingPoint) -> bool:
    """True if the middle point is below the line from the first to the last."""
    rise, run = middle.again - first.again, first.saved - middle.saved
    return rise * (first.saved - last.saved) < (last.again - first.again) * run
