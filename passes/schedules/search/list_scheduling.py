"""List scheduling of a pipeline: a free rank runs the most urgent task that it can."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from .problem import ROUNDING, OrderProblem

_NEVER = math.inf


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule by which a free rank chooses a task.

    Attributes:
        urgency: the urgency of tasks, by lane and microbatch; of the tasks that can run, the one
            with the largest urgency runs.
        patience: for F, B and W, how long to wait for a more urgent task that is known to come, as
            a share of the chosen task's time.
        swing: the urgency added to an F after a B.
        ahead: for each part, how far its forwards may be ahead of its backwards.
    """

    urgency: Sequence[Sequence[float]]
    patience: tuple[float, float, float]
    swing: float = 0.0
    ahead: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Listed:
    """A list schedule: the lanes that each rank runs in order, with their starts."""

    lanes: list[list[int]]
    starts: list[list[float]]

    def spans(self, problem: OrderProblem) -> list[float]:
        """For each rank the time from its first start to its last end."""
        durations = problem.durations
        return [
            starts[-1] + durations[lanes[-1]] - starts[0]
            for lanes, starts in zip(self.lanes, self.starts, strict=True)
        ]


def list_schedule(problem: OrderProblem, rule: Rule, longest: float = _NEVER) -> Listed | None:
    """Run all tasks in order of time, where each free rank runs the most urgent task that it can.

    Times and memory are tracked as in the real run, so the result never exceeds the capacities. A
    part leaves room for a microbatch in each later part of its rank, so the microbatch that has
    come furthest can always go on. An F without room lends its urgency to W, which makes room; so
    does a B that needs memory.

    Args:
        problem: the problem to order.
        rule: the rule by which a free rank chooses.
        longest: the longest span that is of use.

    Returns:
        The list schedule. None if the ranks come to wait for memory for ever, or as soon as a
        rank's remaining work is sure to make its span longer than `longest`.

    Source: list scheduling, Graham 1966; with tails as urgency it is the rule of Schrage, see
    Carlier, The one-machine sequencing problem, 1982.
    """
    n, m = problem.parts, problem.microbatches
    rank_of, durations, transfers = problem.rank_of, problem.durations, problem.transfers
    grows, needs, split = problem.grows, problem.needs, problem.split
    urgency, swing = rule.urgency, rule.swing
    patience = [rule.patience[lane // n] * durations[lane] for lane in range(3 * n)]
    ahead = rule.ahead or (_NEVER,) * n
    # The room that an F needs: its own, that of a microbatch in each later part of its rank, and
    # the memory that a B of the rank may need.
    rooms = [
        problem.reserve(rank_of[k])
        + sum(grows[later] for later in problem.hosted[rank_of[k]] if later >= k)
        for k in range(n)
    ]
    limits = [c * (1.0 + ROUNDING) + ROUNDING for c in problem.capacities]
    forwards: list[list[float]] = [[] for _ in range(n)]
    backwards: list[list[float]] = [[] for _ in range(n)]
    forwards[0] = [0.0] * m
    f, b, w = [0] * n, [0] * n, [0] * n
    held = [0.0] * problem.ranks
    free = [0.0] * problem.ranks
    swings = [0.0] * problem.ranks
    # The data that a free rank looks at, in one place. The last part comes first: its tasks free
    # memory soonest, so they win among equals.
    hosted = [
        [
            (k, backwards[k], urgency[n + k], needs[k], forwards[k], urgency[k], rooms[k], ahead[k])
            for k in reversed(parts)
        ]
        for parts in problem.hosted
    ]
    weights = [
        [(k, urgency[2 * n + k]) for k in reversed(parts)] if split else []
        for parts in problem.hosted
    ]
    lanes: list[list[int]] = [[] for _ in hosted]
    starts: list[list[float]] = [[] for _ in hosted]
    events = [(0.0, rank) for rank in range(problem.ranks)]
    heapify(events)
    last = n - 1
    left = [m * problem.work(rank) for rank in range(problem.ranks)]
    slack = 2 * ROUNDING * (1.0 + longest)
    due = [longest + slack] * problem.ranks
    while events:
        now, rank = heappop(events)
        if free[rank] > now:
            continue
        chosen, lent = -1, False
        best = blocked = -_NEVER
        coming: list[tuple[float, float]] = []
        room = limits[rank] - held[rank]
        more = swings[rank]
        for k, ready_b, urgent_b, need, ready_f, urgent_f, room_f, limit in hosted[rank]:
            i = b[k]
            if i < len(ready_b):
                time, value = ready_b[i], urgent_b[i]
                if time > now:
                    coming.append((time, value))
                elif need > room:
                    if value > blocked:
                        blocked = value
                elif value > best:
                    best, chosen = value, n + k
            j = f[k]
            if j < len(ready_f) and j - i < limit:
                time, value = ready_f[j], urgent_f[j] + more
                if room_f > room:
                    if time <= now and value > blocked:
                        blocked = value
                elif time > now:
                    coming.append((time, value))
                elif value > best:
                    best, chosen = value, k
        for k, urgent_w in weights[rank]:
            i = w[k]
            if i < b[k]:
                value = urgent_w[i]
                if value < blocked:
                    value, lent = blocked, True
                if value > best:
                    best, chosen = value, 2 * n + k
        if chosen < 0:
            continue
        length = durations[chosen]
        if coming and not (lent and chosen >= 2 * n):
            awaited = until = now + patience[chosen]
            for time, value in coming:
                if value > best and time < awaited:
                    awaited = time
            if awaited < until:
                heappush(events, (awaited, rank))
                continue
        if now > free[rank]:  # it was idle
            if not starts[rank]:
                due[rank] = now + longest + slack
            elif now + left[rank] > due[rank]:
                return None
        lanes[rank].append(chosen)
        starts[rank].append(now)
        held[rank] += grows[chosen]
        end = now + length
        left[rank] -= length
        free[rank] = end
        heappush(events, (end, rank))
        if chosen < n:
            swings[rank] = 0.0
            k = chosen
            f[k] += 1
            if k == last:
                backwards[k].append(end)
                continue
            time = end + transfers[k]
            forwards[k + 1].append(time)
            consumer = rank_of[k + 1]
        elif chosen < 2 * n:
            swings[rank] = swing
            k = chosen - n
            b[k] += 1
            if k == 0:
                continue
            time = end + transfers[k - 1]
            backwards[k - 1].append(time)
            consumer = rank_of[k - 1]
        else:
            w[chosen - 2 * n] += 1
            continue
        if free[consumer] <= time:
            heappush(events, (time, consumer))
    if sum(map(len, lanes)) < problem.tasks:
        return None
    return Listed(lanes, starts)
