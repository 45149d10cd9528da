"""Compute a lower bound of the makespan, which no order of the tasks can beat.

Each rank's time begins with its first task, so all ranks have the same window. The *head* of a task
is the earliest time at which it can start: after the chain of tasks that it needs on other ranks,
after the tasks that must run before it on its own rank, and after memory is free for it. Its *tail*
is the least time from its end to the end of the window, by the same rules backwards. For each rank,
a preemptive schedule of its tasks with their heads and tails bounds the window.

If a rank has several parts, memory does not determine which W must run before an F, but how many W
of any part. So the bound is computed a second time, with a rank's W taken in the order in which
they run: the first few of them have long tails, whichever tasks they are.

Sources: heads, tails and the preemptive bound of one machine are those of job-shop scheduling
(Carlier 1982; Carlier and Pinson 1989); memory as a source of heads and tails is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from .problem import ROUNDING, OrderProblem

MOST_TASKS = 60_000
"""The most tasks for which all heads and tails are computed; beyond, only the ends are bounded."""


@dataclass(frozen=True, slots=True)
class Windows:
    """The head and the tail of each task, by lane and microbatch, in milliseconds."""

    heads: list[list[float]]
    tails: list[list[float]]


def lower_bound(problem: OrderProblem, windows: Windows | None = None) -> float:
    """A lower bound of the makespan of all orders that run each stage's microbatches in order.

    If a microbatch comes to some rank for the first time after it has come to another rank twice,
    the start of that rank is not a constant. Then the bound is just the work of the busiest rank.

    Args:
        problem: the problem to order.
        windows: its heads and tails, if they are known.

    Returns:
        The bound, in milliseconds.
    """
    work = max(problem.microbatches * problem.work(rank) for rank in range(problem.ranks))
    if not starts_are_constant(problem):
        return work
    bound = max(work, _ends_bound(problem))
    if problem.tasks > MOST_TASKS:
        return bound
    windows = windows or find_windows(problem)
    for rank in range(problem.ranks):
        others = _jobs(problem, windows, rank, (0, 1))
        bound = max(bound, _preemptive(others + _jobs(problem, windows, rank, (2,))))
        in_turn = _weights_in_turn(problem, windows, rank)
        if in_turn:
            bound = max(bound, _preemptive(others + in_turn))
    return bound


def starts_are_constant(problem: OrderProblem) -> bool:
    """True if each rank can start as soon as the first microbatch comes down to it directly."""
    firsts = [parts[0] for parts in problem.hosted]
    return firsts == list(range(len(firsts)))


def find_windows(problem: OrderProblem) -> Windows:
    """The heads and tails of all tasks."""
    return Windows(_heads(problem), _tails(problem))


def lags(problem: OrderProblem) -> tuple[list[float], list[float]]:
    """The times between parts, where each rank's time begins with its first task.

    Returns:
        For each part the time from the end of its F to the start of F on the next part; and the
        time from the end of its B to the start of B on the part before.
    """
    offsets, rank_of, transfers = problem.offsets, problem.rank_of, problem.transfers
    down, up = [], [0.0]
    for k in range(problem.parts - 1):
        shift = offsets[rank_of[k]] - offsets[rank_of[k + 1]]
        down.append(transfers[k] + shift)
        up.append(transfers[k] - shift)
    return [*down, 0.0], up


def _unit_release(problem: OrderProblem, k: int) -> float:
    """The least time in which a part frees the memory of one microbatch."""
    n = problem.parts
    tb, tw = problem.durations[n + k], problem.durations[2 * n + k]
    share = problem.kept[k]
    return min(tb + tw, tb / (1.0 - share) if share < 1.0 else math.inf)


def _heads(problem: OrderProblem) -> list[list[float]]:
    n, m = problem.parts, problem.microbatches
    tf, tb, _ = _times(problem)
    sizes = problem.grows[:n]
    down, up = lags(problem)
    heads = [[0.0] * m for _ in range(3 * n)]
    for i in range(m):
        for k in range(n):
            rank = problem.rank_of[k]
            head = heads[k - 1][i] + tf[k - 1] + down[k - 1] if k else 0.0
            if i:
                head = max(head, heads[k][i - 1] + tf[k])
            upto = [j for j in problem.hosted[rank] if j <= k]
            before = sum(tf[j] * (i + (j < k)) for j in upto)
            need = sum(sizes[j] for j in upto) * (i + 1) - problem.capacities[rank]
            if need > ROUNDING * max(1.0, problem.capacities[rank]):
                # Of these parts, the last one is the first to free memory.
                count = math.ceil(need / sum(sizes[j] for j in upto) - ROUNDING)
                free = n + k if problem.kept[k] < 1.0 else 2 * n + k
                if count:
                    head = max(head, heads[free][count - 1] + problem.durations[free])
                before += need * min(_unit_release(problem, j) / sizes[j] for j in upto if sizes[j])
            heads[k][i] = max(head, before)
        for k in reversed(range(n)):
            own = heads[k][i] + tf[k]
            head = max(own, heads[n + k + 1][i] + tb[k + 1] + up[k + 1]) if k + 1 < n else own
            if i:
                head = max(head, heads[n + k][i - 1] + tb[k])
            parts = problem.hosted[problem.rank_of[k]]
            before = (i + 1) * sum(tf[j] for j in parts)
            before += sum(tb[j] * (i + (j > k)) for j in parts if j >= k)
            heads[n + k][i] = max(head, before)
            heads[2 * n + k][i] = heads[n + k][i] + tb[k]
    return heads


def _tails(problem: OrderProblem) -> list[list[float]]:
    n, m = problem.parts, problem.microbatches
    tf, tb, tw = _times(problem)
    down, up = lags(problem)
    tails = [[0.0] * m for _ in range(3 * n)]
    for i in reversed(range(m)):
        for k in range(n):
            parts = problem.hosted[problem.rank_of[k]]
            size = problem.grows[k]
            capacity = problem.capacities[problem.rank_of[k]]
            # F of the microbatch `freed` waits for memory that B, or W, of microbatch i frees.
            freed = i + int(capacity / size * (1.0 + ROUNDING)) if size else m
            tail = tails[2 * n + k][i + 1] + tw[k] if i + 1 < m else 0.0
            if freed < m and problem.kept[k] >= 1.0:
                tail = max(tail, tf[k] + tails[k][freed])
                if len(parts) == 1:
                    tail = max(tail, (m - freed) * (tf[k] + tb[k]) + (m - i - 1) * tw[k])
            tails[2 * n + k][i] = tail
            tail += tw[k]
            if k:
                tail = max(tail, up[k] + tb[k - 1] + tails[n + k - 1][i])
            if i + 1 < m:
                tail = max(tail, tb[k] + tails[n + k][i + 1])
            after = sum(tb[j] * (m - i - (j == k)) + tw[j] * (m - i) for j in parts if j <= k)
            if freed < m:
                tail = max(tail, tf[k] + tails[k][freed])
                after += (m - freed) * tf[k] if len(parts) == 1 else 0.0
            tails[n + k][i] = max(tail, after)
        for k in reversed(range(n)):
            parts = problem.hosted[problem.rank_of[k]]
            tail = tb[k] + tails[n + k][i]
            if k + 1 < n:
                tail = max(tail, down[k] + tf[k + 1] + tails[k + 1][i])
            if i + 1 < m:
                tail = max(tail, tf[k] + tails[k][i + 1])
            after = (m - i) * sum(tb[j] + tw[j] for j in parts)
            after += sum(tf[j] * (m - i - (j == k)) for j in parts if j >= k)
            tails[k][i] = max(tail, after)
    return tails


def _times(problem: OrderProblem) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    n, times = problem.parts, problem.durations
    return times[:n], times[n : 2 * n], times[2 * n :]


_Job = tuple[float, float, float]
"""The head, the tail and the time of a task."""


def _jobs(problem: OrderProblem, windows: Windows, rank: int, actions: Sequence[int]) -> list[_Job]:
    """The tasks of a rank with these actions, as jobs; 0, 1, 2 stand for F, B, W."""
    n = problem.parts
    return [
        (head, tail, problem.durations[lane])
        for k in problem.hosted[rank]
        for lane in (action * n + k for action in actions)
        for head, tail in zip(windows.heads[lane], windows.tails[lane], strict=True)
    ]


def _weights_in_turn(problem: OrderProblem, windows: Windows, rank: int) -> list[_Job]:
    """The W of a rank as jobs, in the order in which they run, of whatever part and microbatch.

    Let W number w be the W that runs after w others on its rank. In every order:

    - Of the first w + 1 W to run, at least one has a head no smaller than number w of all heads of
      W, ascending. So W number w starts no earlier. The same holds for tails, descending, as a W
      that runs later ends later.
    - When F number j of the rank starts, of any part, the rank holds the activations of j + 1
      microbatches, less the memory that finished W have freed. Each counts at least the smaller of
      its sizes before and after B. So finished W have freed at least the sum of the j + 1 smallest
      such sizes, less the capacity. Divided by the largest such size, this is the least number of
      finished W. From the start of F number j to the end, there is at least number j of all tails
      of F, descending, counted from their starts. So the last W that must be finished has that
      tail.
    - Each W takes at least as long as the shortest W of the rank. The rest of the longer W's times
      is a job of its own, without a tail.

    A preemptive schedule may use all of these heads and tails together. The result is empty if W
    takes no time, or frees nothing.
    """
    n, m, parts = problem.parts, problem.microbatches, problem.hosted[rank]
    times = problem.durations
    shortest = min(times[2 * n + k] for k in parts)
    activations = [problem.grows[k] + min(0.0, problem.grows[n + k]) for k in parts]
    largest = max(activations)
    if not shortest or largest <= 0.0:
        return []
    heads = sorted(head for k in parts for head in windows.heads[2 * n + k])
    tails = sorted((tail for k in parts for tail in windows.tails[2 * n + k]), reverse=True)
    starts = sorted((times[k] + t for k in parts for t in windows.tails[k]), reverse=True)
    held = -problem.capacities[rank] * (1.0 + ROUNDING) - ROUNDING
    sizes = sorted(size for size in activations for _ in range(m))
    for size, tail in zip(sizes, starts, strict=True):
        held += size
        ended = math.ceil(held / largest - ROUNDING)
        if ended > 0:
            tails[ended - 1] = max(tails[ended - 1], tail)
    for w in reversed(range(len(tails) - 1)):
        tails[w] = max(tails[w], tails[w + 1] + shortest)
    longer = m * sum(times[2 * n + k] - shortest for k in parts)
    return [(heads[0], 0.0, longer), *((h, t, shortest) for h, t in zip(heads, tails, strict=True))]


def _preemptive(jobs: Sequence[_Job]) -> float:
    """The makespan of the best preemptive schedule of a rank's jobs: longest tail first."""
    tasks = sorted((head, -tail, time) for head, tail, time in jobs if time)
    ready: list[tuple[float, float]] = []
    bound = clock = 0.0
    at = 0
    while at < len(tasks) or ready:
        if not ready:
            clock = max(clock, tasks[at][0])
        while at < len(tasks) and tasks[at][0] <= clock:
            heappush(ready, (tasks[at][1], tasks[at][2]))
            at += 1
        tail, left = heappop(ready)
        until = tasks[at][0] if at < len(tasks) else math.inf
        if clock + left > until:
            heappush(ready, (tail, left - (until - clock)))
            clock = until
        else:
            clock += left
            bound = max(bound, clock - tail)
    return bound


def _ends_bound(problem: OrderProblem) -> float:
    """A bound from the idle time of each rank before its first B and after its last B.

    Before the first B, a rank can only run the forwards that memory allows. After the last B, it
    can only run the W that memory has allowed it to put off.
    """
    n, m = problem.parts, problem.microbatches
    tf, tb, tw = _times(problem)
    down, up = lags(problem)
    first, last = [0.0] * n, [0.0] * n
    clock = 0.0
    for k in range(n):
        clock += tf[k] + (down[k] if k + 1 < n else 0.0)
    for k in reversed(range(n)):
        first[k] = clock
        clock += tb[k] + up[k]
    clock = 0.0
    for k in range(n):
        clock = max(clock, 0.0)
        last[k] = max(clock, tw[k])
        clock = last[k] + (tb[k] + up[k + 1] if k + 1 < n else 0.0)
    bound = 0.0
    for rank, parts in enumerate(problem.hosted):
        capacity = problem.capacities[rank]
        ahead = _within(capacity, [tf[k] for k in parts], [problem.grows[k] for k in parts], m)
        weight_sizes = [-problem.grows[2 * n + k] for k in parts]
        put_off = _within(capacity, [tw[k] for k in parts], weight_sizes, m)
        idle = min(first[k] for k in parts) - ahead, min(last[k] for k in parts) - put_off
        bound = max(bound, m * problem.work(rank) + max(0.0, idle[0]) + max(0.0, idle[1]))
    return bound


def _within(
    capacity: float, times: Sequence[float], sizes: Sequence[float], microbatches: int
) -> float:
    """The most time of tasks, of all microbatches, that fit into memory together.

    Args:
        capacity: the memory of the rank.
        times: the time of the task on each part.
        sizes: the memory that the task takes on each part.
        microbatches: the number of microbatches.
    """
    total = microbatches * sum(times)
    if not all(sizes):
        return total
    return min(total, capacity * max(t / size for t, size in zip(times, sizes, strict=True)))
