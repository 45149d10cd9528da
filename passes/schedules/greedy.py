"""List scheduling of a pipeline in time: whenever a rank is free, it picks what to run next."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from ...ir.attributes import Action
from ...ir.pipeline.costs import Costs
from ...ir.pipeline.order import Order
from .base import Pipeline, spell

_SLACK = 1e-9
"""Sums of shares of activations are compared up to this much."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The preference of a free rank where that is a matter of taste.

    Attributes:
        patience: W runs if no other task is known to come within this share of its time.
        care: F runs if no B is known to come within this share of its time.
        alternate: after B, F comes before the next B.
        ahead: F runs if its part is at most so many microbatches further ahead of its own
            backwards than it takes to fill the time until the first one; None for no such bound.
    """

    patience: float
    care: float
    alternate: bool
    ahead: int | None = None


def greedy_order(pipeline: Pipeline, max_activations: float, costs: Costs, policy: Policy) -> Order:
    """Let every rank run B if it can, else F if it can and there is memory, else W.

    All times and all memory are known as in the real run, so the result never holds more than it
    may. The last part's tasks come first, as they free memory soonest. A part whose rank hosts
    later ones leaves room for a microbatch in each of these, so the microbatch that has come
    furthest can always go on.

    Args:
        pipeline: any stages on any ranks.
        max_activations: microbatches that a rank may hold, at least 1; counted as in
            `Timeline.peak`.
        costs: of tasks, transfers and what W keeps.
        policy: the choices that no rule decides.

    Source: the heuristic of Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, made
    one rule for all phases and for several parts a rank; list scheduling, Graham 1966.
    """
    parts = _parts(pipeline, costs, policy)
    ranks = {rank: _Rank() for rank in pipeline.ranks}
    for part in reversed(parts):
        ranks[part.rank].parts.append(part)
    for rank in ranks.values():
        rank.capacity = max_activations * sum(part.size for part in rank.parts) + _SLACK
    _run(parts, ranks, costs.mw, policy)
    stages = pipeline.parts
    return {
        number: spell(pipeline, [stages[part.index] for part in reversed(rank.parts)], rank.word)
        for number, rank in ranks.items()
    }


@dataclass(slots=True, eq=False)
class _Part:
    """Neighbouring stages of one rank, and how far they are.

    Attributes:
        index, rank, chunk: its place in the pipeline, its rank, and its place among the rank's.
        size: how many stages it has, which is the memory that a microbatch takes.
        times: of F, B and W, by these letters.
        down, up: times of transfers to the next part and to the one before.
        reserve: memory that its F leaves, for one microbatch in each later part of its rank.
        limit: how far its forwards may be ahead of its backwards.
        forwards, backwards: when what each F, or B, needs comes, as far as that is known.
        f, b, w: how many of each have run.
    """

    index: int
    rank: int
    chunk: int
    size: int
    times: dict[str, float]
    down: float
    up: float
    reserve: int = 0
    limit: float = math.inf
    forwards: list[float] = field(default_factory=list)
    backwards: list[float] = field(default_factory=list)
    f: int = 0
    b: int = 0
    w: int = 0


@dataclass(slots=True, eq=False)
class _Rank:
    """A rank: its parts, last first; its memory; until when it is busy; what it has run."""

    capacity: float = 0.0
    parts: list[_Part] = field(default_factory=list)
    held: float = 0.0
    free: float = 0.0
    word: list[str] = field(default_factory=list)
    last: str = "B"


def _parts(pipeline: Pipeline, costs: Costs, policy: Policy) -> list[_Part]:
    parts: list[_Part] = []
    chunks: dict[int, int] = {}
    for index, stages in enumerate(pipeline.parts):
        rank = pipeline.stage_ranks[stages[0]]
        chunk = chunks[rank] = chunks.get(rank, -1) + 1
        times = {a.value: sum(costs.of(a, s, split=True) for s in stages) for a in Action}
        down = costs.between(stages[-1]) if stages[-1] + 1 < pipeline.stages else 0.0
        up = costs.between(stages[0] - 1) if index else 0.0
        parts.append(_Part(index, rank, chunk, len(stages), times, down, up))
    later: Counter[int] = Counter()
    there_and_back = 0.0
    for part in reversed(parts):
        part.reserve = later[part.rank]
        later[part.rank] += part.size
        tf = part.times["F"]
        there_and_back += tf
        if policy.ahead is not None and tf:
            part.limit = max(1, math.ceil(there_and_back / tf - _SLACK) + policy.ahead)
        there_and_back += part.times["B"] + 2 * part.up
    parts[0].forwards = [0.0] * pipeline.microbatches
    return parts


def _run(parts: list[_Part], ranks: dict[int, _Rank], mw: float, policy: Policy) -> None:
    """Run all tasks in order of time; `events` are times at which a rank may find work."""
    grows = {"F": 1.0, "B": mw - 1.0, "W": -mw}
    events = [(0.0, number) for number in ranks]
    heapify(events)
    while events:
        now, number = heappop(events)
        rank = ranks[number]
        if rank.free > now:
            continue
        choice = _choose(rank, now, policy)
        if choice is None:
            continue
        action, part = choice
        rank.word.append(f"{action}{part.chunk}")
        rank.held += grows[action] * part.size
        if action != "W":
            rank.last = action
        rank.free = end = now + part.times[action]
        heappush(events, (end, number))
        other = _pass_on(parts, part, action, end)
        if other is not None:
            heappush(events, (max(other[0], end), other[1]))


def _choose(rank: _Rank, now: float, policy: Policy) -> tuple[str, _Part] | None:
    """The task that a free rank runs now; None if it had better wait for what is to come."""
    forward = backward = weight = None
    next_forward = next_backward = math.inf
    starved = False
    for part in rank.parts:
        if part.b < len(part.backwards):
            time = part.backwards[part.b]
            if time > now:
                next_backward = min(next_backward, time)
            elif backward is None:
                backward = part
        if part.f < len(part.forwards) and part.f - part.b < part.limit:
            time = part.forwards[part.f]
            room = rank.held + part.size + part.reserve <= rank.capacity
            if time > now:
                next_forward = min(next_forward, time) if room else next_forward
            elif not room:
                starved = True
            elif forward is None:
                forward = part
        if weight is None and part.w < part.b:
            weight = part
    if forward and next_backward < now + policy.care * forward.times["F"]:
        forward = None
    turn = policy.alternate and rank.last == "B"
    if backward and not (forward and turn):
        return "B", backward
    if forward:
        return "F", forward
    if weight:
        until = now + policy.patience * weight.times["W"]
        if starved or min(next_forward, next_backward) >= until:
            return "W", weight
    return None


def _pass_on(parts: list[_Part], part: _Part, action: str, end: float) -> tuple[float, int] | None:
    """Note what a task that ends at `end` lets start; return when that is, and on which rank."""
    if action == "W":
        part.w += 1
        return None
    if action == "F":
        part.f += 1
        if part.index + 1 == len(parts):
            part.backwards.append(end)
            return None
        other = parts[part.index + 1]
        time = end + part.down
        other.forwards.append(time)
    else:
        part.b += 1
        if part.index == 0:
            return None
        other = parts[part.index - 1]
        time = end + part.up
        other.backwards.append(time)
    return time, other.rank
