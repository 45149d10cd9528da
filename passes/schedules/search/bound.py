"""A lower bound of the makespan: no order of the tasks, however clever, is shorter.

Time is that of each rank, which begins with its first task; so all ranks have the same window. The
*head* of a task is the earliest time at which it can start: after the chain of tasks that it needs
on other ranks, after what must run before on its own rank, and after memory is free for it. Its
*tail* is the least time from its end to the end of the window, by the same rules backwards. For
each rank, a preemptive schedule of its tasks with their heads and tails bounds the window.

Sources: heads, tails and the preemptive bound of one machine are those of job-shop scheduling
(Carlier 1982; Carlier and Pinson 1989); memory as a source of heads and tails is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from .problem import ROUNDING, Problem

MOST_TASKS = 60_000
"""Up to so many tasks each has its head and tail; beyond, only the first and the last B have."""


@dataclass(frozen=True, slots=True)
class Windows:
    """The head and the tail of each task, by lane and microbatch, in milliseconds."""

    heads: list[list[float]]
    tails: list[list[float]]


def lower_bound(problem: Problem, windows: Windows | None = None) -> float:
    """The least makespan that any order can have that runs a stage's microbatches in order.

    Args:
        problem: what has to be ordered.
        windows: its heads and tails, if they are known.

    Where a microbatch comes to a rank for the first time after it has come to another one twice,
    the start of that rank is no constant, and the bound is the work of the busiest rank alone.
    """
    work = max(problem.microbatches * problem.work(rank) for rank in range(problem.ranks))
    if not starts_are_constant(problem):
        return work
    bound = max(work, _ends_bound(problem))
    if problem.tasks > MOST_TASKS:
        return bound
    windows = windows or find_windows(problem)
    return max(bound, *(_preemptive(problem, windows, rank) for rank in range(problem.ranks)))


def starts_are_constant(problem: Problem) -> bool:
    """True if each rank starts with the first microbatch as soon as that can have come to it."""
    firsts = [parts[0] for parts in problem.hosted]
    return firsts == list(range(len(firsts)))


def find_windows(problem: Problem) -> Windows:
    """The heads and tails of all tasks."""
    return Windows(_heads(problem), _tails(problem))


def lags(problem: Problem) -> tuple[list[float], list[float]]:
    """The time from the end of F on a part to its start on the next, each in its rank's time.

    The second list has that from the end of B on a part to its start on the one before.
    """
    offsets, rank_of, transfers = problem.offsets, problem.rank_of, problem.transfers
    down, up = [], [0.0]
    for k in range(problem.parts - 1):
        shift = offsets[rank_of[k]] - offsets[rank_of[k + 1]]
        down.append(transfers[k] + shift)
        up.append(transfers[k] - shift)
    return [*down, 0.0], up


def _unit_release(problem: Problem, k: int) -> float:
    """The least time in which a part gives back the memory of one microbatch."""
    n = problem.parts
    tb, tw = problem.durations[n + k], problem.durations[2 * n + k]
    kept = problem.kept[k]
    return min(tb + tw, tb / (1.0 - kept) if kept < 1.0 else math.inf)


def _heads(problem: Problem) -> list[list[float]]:
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
                # Of these parts, the last one is the first to give back.
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


def _tails(problem: Problem) -> list[list[float]]:
    n, m = problem.parts, problem.microbatches
    tf, tb, tw = _times(problem)
    down, up = lags(problem)
    tails = [[0.0] * m for _ in range(3 * n)]
    for i in reversed(range(m)):
        for k in range(n):
            parts = problem.hosted[problem.rank_of[k]]
            size = problem.grows[k]
            capacity = problem.capacities[problem.rank_of[k]]
            # F of this microbatch has to wait for memory that B, or W, of microbatch i gives back.
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


def _times(problem: Problem) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    n, times = problem.parts, problem.durations
    return times[:n], times[n : 2 * n], times[2 * n :]


def _preemptive(problem: Problem, windows: Windows, rank: int) -> float:
    """The makespan of the best preemptive schedule of a rank: the longest tail first."""
    n = problem.parts
    tasks = sorted(
        (head, -tail, problem.durations[lane])
        for k in problem.hosted[rank]
        for lane in (k, n + k, 2 * n + k)
        for head, tail in zip(windows.heads[lane], windows.tails[lane], strict=True)
        if problem.durations[lane]
    )
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


def _ends_bound(problem: Problem) -> float:
    """What a rank cannot fill before its first B and after its last, beside its work.

    Before the first B it can run forwards, as far as there is memory; after the last one, those W
    that there was memory to put off.
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
        kept = [-problem.grows[2 * n + k] for k in parts]
        put_off = _within(capacity, [tw[k] for k in parts], kept, m)
        idle = min(first[k] for k in parts) - ahead, min(last[k] for k in parts) - put_off
        bound = max(bound, m * problem.work(rank) + max(0.0, idle[0]) + max(0.0, idle[1]))
    return bound


def _within(
    capacity: float, times: Sequence[float], sizes: Sequence[float], microbatches: int
) -> float:
    """The most time of tasks of these times and sizes that memory allows."""
    total = microbatches * sum(times)
    if not all(sizes):
        return total
    return min(total, capacity * max(t / size for t, size in zip(times, sizes, strict=True)))
