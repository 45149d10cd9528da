"""Merge the work of all ranks into one order that follows each rank's schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from heapq import heapify, heappop, heappush

from ...ir.attributes import Action, Task
from ...ir.ops import Call, Op, Recv, Return, Send, Value
from ...ir.ops.module import Module
from ...ir.pipeline.order import splits_backward
from ...ir.text.diagnostics import Diagnostic, IRError, error
from ...ir.types import format_ranks
from ..schedules import Order, Pipeline, Schedule, names
from .prefetch import prefetch
from .sums import sum_as_terms_come
from .tasks_in_flight import TASK, overlapped_starts
from .work import ProgramWork

_LEAD = 2
"""The units of time between an early send and the first use of its value."""


def global_order(
    module: Module, work: ProgramWork, schedule: Schedule, window: int, in_flight: int
) -> list[int]:
    """The indices of nodes and early ops in an order that every rank can follow.

    In each round, every rank runs its tasks in the order of `schedule`. The ranks of a group run a
    stage together, and count as one rank in the schedule. Work outside of tasks runs as soon as the
    nodes that it follows have run, but tasks that could start at the same time come first. Time is
    counted in units: a task takes one, and so does an actor's call outside of tasks.

    Args:
        module: the module of the work.
        work: the work of the program; the operands of its additions are changed.
        schedule: the order of tasks.
        window: as in `prefetch`.
        in_flight: how many tasks a rank may have begun that have not ended.

    Raises:
        IRError: the schedule contradicts the step; the message shows the tasks of a cycle.
        ValueError: the schedule is not for these stages and microbatches.
    """
    rows = [tasks for order in _orders(work, schedule) for tasks in order.values()]
    chained = _chain(work, rows)
    times = _list_schedule(work, chained)
    if len(times) < len(work.nodes):
        raise _circle(work, chained, times, schedule)
    order = _placed(work, times, work.late, window, _LEAD)
    if in_flight == 1:
        return sum_as_terms_come(work, order, order)
    starts = overlapped_starts(module, work, rows, in_flight)
    elsewhere = {node for node in work.late if work.program.ops[node].task not in work.anchors}
    lead = _LEAD * TASK
    # Sums have the terms in the order of the schedule, so results are the same to the last bit.
    return sum_as_terms_come(work, _placed(work, starts, elsewhere, window, lead), order)


def _placed(
    work: ProgramWork, times: dict[int, int], late: Set[int], window: int, lead: int
) -> list[int]:
    """The order of starts, with nodes that wait, or are waited for, where that costs least.

    Args:
        work: the work of the program.
        times: the start of each node, in the order of starts.
        late: the collectives that are put off to their first use.
        window: as in `prefetch`.
        lead: the time between an early send and the first use of its value.
    """
    order = _put_off(work, times, late) if late else list(times)
    if work.ahead or work.behind:
        order = prefetch(work, order, window)
    return _insert_early(work, order, times, lead) if work.early else order


def _chain(work: ProgramWork, rows: Iterable[Sequence[Task]]) -> dict[int, int]:
    """For each anchor, the anchor that its rank runs just before it."""
    chained: dict[int, int] = {}
    for tasks in rows:
        last: int | None = None
        for task in tasks:
            for anchor in work.anchors.get(task, ()):
                if last is not None:
                    chained[anchor] = last
                last = anchor
    return chained


def _orders(work: ProgramWork, schedule: Schedule) -> list[Order]:
    """The schedule's order for each round, with the module's numbers of stages and microbatches."""
    rounds: dict[int, list[int]] = {}
    for stage, (round_, _) in sorted(work.stages.items()):
        rounds.setdefault(round_, []).append(stage)
    microbatches: dict[int, set[int]] = {}
    for task in work.anchors:
        if task.stage in work.stages:
            round_, _ = work.stages[task.stage]
            microbatches.setdefault(round_, set()).add(task.microbatch)
    orders: list[Order] = []
    for round_, stages in rounds.items():
        if numbers := sorted(microbatches.get(round_, ())):
            ranks = tuple(work.stages[stage][1] for stage in stages)
            order = schedule(Pipeline(ranks, len(numbers)))
            together = schedule.splits and not splits_backward(order)
            orders.append(
                {
                    rank: [
                        Task(stages[task.stage], action, numbers[task.microbatch])
                        for task in tasks
                        for action in _actions(task, together)
                    ]
                    for rank, tasks in order.items()
                }
            )
    return orders


def _actions(task: Task, together: bool) -> tuple[Action, ...]:
    """The actions of a task; with `together`, each B is followed by its W."""
    if together and task.action is Action.BACKWARD:
        return Action.BACKWARD, Action.WEIGHT
    return (task.action,)


def _list_schedule(work: ProgramWork, chained: dict[int, int]) -> dict[int, int]:
    """The start of each node, in the order of starts; nodes that can never start are left out.

    Source: list scheduling, Graham 1966; resources are unlimited, except for the chains.
    """
    nodes, costs, ops = work.nodes, work.costs, work.program.ops
    count = [0] * len(ops)
    start = [0] * len(ops)
    followers: list[list[int]] = [[] for _ in ops]
    for node in nodes:
        for neighbour in work.follows[node]:
            followers[neighbour].append(node)
        count[node] = len(work.follows[node])
    for node, neighbour in chained.items():
        followers[neighbour].append(node)
        count[node] += 1
    # Of the nodes that start at one time, those without cost come first, then tasks, then calls.
    kind = [(2 - (ops[i].task is not None)) if i in costs else 0 for i in range(len(ops))]
    size = len(ops)
    # One integer for (time, kind, index) compares faster than a tuple.
    heap = [kind[node] * size + node for node in nodes if not count[node]]
    heapify(heap)
    times: dict[int, int] = {}
    while heap:
        node = heappop(heap) % size
        times[node] = start[node]
        end = start[node] + costs.get(node, 0)
        for neighbour in followers[node]:
            if start[neighbour] < end:
                start[neighbour] = end
            count[neighbour] -= 1
            if not count[neighbour]:
                heappush(heap, (start[neighbour] * 3 + kind[neighbour]) * size + neighbour)
    return times


def _put_off(work: ProgramWork, times: Iterable[int], late: Set[int]) -> list[int]:
    """Put each of some collectives just before the first node that follows it, if there is one."""
    used = {followed for node in work.nodes for followed in work.follows[node]}
    waiting = set(late & used)
    order: list[int] = []

    def issue(node: int) -> None:
        for followed in sorted(waiting.intersection(work.follows[node])):
            if followed in waiting:
                waiting.remove(followed)
                issue(followed)
        order.append(node)

    for node in times:
        if node not in waiting:
            issue(node)
    return order


def _insert_early(
    work: ProgramWork, order: list[int], times: dict[int, int], lead: int
) -> list[int]:
    """Put each early op a little before its first use; an op without a use is dropped."""
    needed = _needed(work, times)
    early = sorted((needed[i] - lead, i) for i in work.early if i in needed)
    merged: list[int] = []
    at = 0
    for node in order:
        while at < len(early) and early[at][0] <= times[node]:
            merged.append(early[at][1])
            at += 1
        merged.append(node)
    return merged + [index for _, index in early[at:]]


def _needed(work: ProgramWork, times: dict[int, int]) -> dict[int, int]:
    """For each op that is not a node, the time at which a node first depends on it."""
    ops = work.program.ops
    makers = {value: index for index, op in enumerate(ops) for value in op.results}
    sends = {(op.chan, op.seq): i for i, op in enumerate(ops) if isinstance(op, Send)}
    end = max(times.values(), default=0) + 1
    needed: dict[int, int] = {}
    for index in range(len(ops) - 1, -1, -1):
        op = ops[index]
        time = end if isinstance(op, Return) else times.get(index, needed.get(index))
        if time is None:
            continue
        before = [makers[value] for value in op.operands if value in makers]
        if isinstance(op, Recv):
            before.append(sends[op.chan, op.seq])
        for source in before:
            if source not in times:
                needed[source] = min(time, needed.get(source, time))
    return needed


def _circle(
    work: ProgramWork, chained: dict[int, int], times: dict[int, int], schedule: Schedule
) -> IRError:
    """The error that shows a cycle of nodes that wait for each other."""
    node = next(node for node in work.nodes if node not in times)
    path: dict[int, int] = {}
    while node not in path:
        before = [*work.follows[node], *([chained[node]] if node in chained else [])]
        path[node] = next(awaited for awaited in before if awaited not in times)
        node = path[node]
    circle = [node]
    while path[circle[-1]] != node:
        circle.append(path[circle[-1]])
    start = min(range(len(circle)), key=lambda i: circle[i])
    circle = circle[start:] + circle[:start]
    ops = work.program.ops
    notes, turned = [], []
    for waiter, awaited in zip(circle, [*circle[1:], circle[0]], strict=True):
        if ops[waiter].task is not None and ops[waiter].task == ops[awaited].task:
            continue
        tasks = ops[waiter].task, ops[awaited].task
        if (
            None not in tasks
            and chained.get(waiter) == awaited
            and awaited not in work.follows[waiter]
        ):
            turned.append("{} before {}".format(*tasks))
        why = _why(work, waiter, awaited, chained.get(waiter) == awaited, schedule)
        message = f"{_describe(ops[waiter])} waits for {_describe(ops[awaited])}, {why}"
        notes.append(Diagnostic(message, op=ops[waiter]))
    carried = _carried(ops, [ops[node] for node in circle])
    remedy = _CARRIED if carried else _help(ops[node] for node in circle)
    behind = _behind_the_loop([ops[node] for node in circle])
    if turned and schedule.name not in names():
        remedy = f"the order is one of your own: put {', or '.join(turned)}"
    elif behind:
        remedy, notes = _IN_THE_LOOP, list(behind)
    return error(
        f"schedule '{schedule.name}' cannot run this step: its tasks wait for each other",
        program=work.program,
        help=remedy,
        notes=(*carried, *notes[:_SHOWN]),
    )


def _behind_the_loop(circle: Sequence[Op]) -> tuple[Diagnostic, ...]:
    """The note on a call behind the loop whose forward and backward are in the circle, if any."""
    for waiter, awaited in zip(circle, [*circle[1:], circle[0]], strict=True):
        if not (isinstance(waiter, Call) and isinstance(awaited, Call) and awaited.task is None):
            continue
        base, backward, _ = waiter.fn.name.rpartition(".vjp.backward")
        if backward and awaited.fn.name == f"{base}.vjp.forward":
            message = f"the backward of @{base} uses what its forward keeps"
            return (Diagnostic(f"{message}, and that follows all microbatches", op=awaited),)
    return ()


def _carried(ops: Sequence[Op], circle: Sequence[Op]) -> tuple[Diagnostic, ...]:
    """The notes on a use of an earlier microbatch's value, on a user's line of the circle."""
    lines = {op.loc for op in circle}
    makers: dict[Value, Op] = {}
    for op in ops:
        for value in op.operands:
            maker = makers.get(value)
            if maker is None or maker.mb is None or op.mb is None or maker.mb >= op.mb:
                continue
            if op.loc in lines:
                message = (
                    f"microbatch {op.mb} uses %{value.name}, which microbatch {maker.mb} makes"
                )
                return (Diagnostic(message, op=op), Diagnostic("it is made here", op=maker))
        makers.update(dict.fromkeys(op.results, op))
    return ()


def _why(work: ProgramWork, waiter: int, awaited: int, chained: bool, schedule: Schedule) -> str:
    """The reason why the node `waiter` follows the node `awaited`, in words."""
    if chained and awaited not in work.follows[waiter]:
        return f"by the order of '{schedule.name}'"
    ops = work.program.ops
    values = set(ops[awaited].results)
    sent: set[tuple[int, int]] = set()
    # The value may have come by way of views and messages, which are not nodes of the circle.
    for op in ops[awaited:waiter]:
        taken = op is ops[awaited] or not values.isdisjoint(op.operands)
        if taken and isinstance(op, Send):
            sent.add((op.chan, op.seq))
        if taken or (isinstance(op, Recv) and (op.chan, op.seq) in sent):
            values.update(op.results)
    by_value = not values.isdisjoint(ops[waiter].operands)
    if by_value:
        return "to have what it made"
    return f"for the state {_holders(work, waiter, awaited)}"


def _holders(work: ProgramWork, one: int, other: int) -> str:
    actors = {work.actors[node] for node in (one, other) if node in work.actors}
    return "of their actor" if len(actors) < 2 else f"that {' and '.join(sorted(actors))} share"


_SHOWN = 12
_CARRIED = (
    "a value is carried from one microbatch to the next, so there is nothing to pipeline: loop "
    "over x.chunk(n) instead of cg.microbatches(x, n), and no schedule orders it; or pass on "
    "value.detach() if no gradient is to flow, and use the schedule 'gpipe'"
)


_IN_THE_LOOP = (
    "compute this in the loop, for each microbatch, and only add up behind it. To divide by a "
    "count of the whole batch, such as of labels that are not masked, write ahead of the loop "
    "`count = (labels != -100).sum()`, in it `losses.append(last.loss(h, y) / count)`, and behind "
    "it `loss = sum(losses)`, as in Masked labels, in docs/howto/data.md; for a plain mean write "
    "cg.mean(losses). Or use the schedule 'gpipe', which runs all forwards first"
)


def _help(circle: Iterable[Op]) -> str:
    if any(op.task is not None and op.task.action is not Action.FORWARD for op in circle):
        return (
            "a backward that must follow the forwards of later microbatches can only start "
            "after all forwards. If it is for a loss over all microbatches, compute each one's "
            "part in the loop, and only add up behind it, or use the schedule 'gpipe'; if it is "
            "for an actor's method that writes to its state, as an optimizer's step does, call "
            "that method behind the loop"
        )
    return (
        "one microbatch must be through before the next may start, so there is nothing to "
        "pipeline. If it is for an actor's method that writes to its state, give each stage an "
        "actor of its own, or make the method traceable"
    )


def _describe(op: Op) -> str:
    name = str(op.task) if op.task is not None else op.opcode
    if op.task is None and isinstance(op, Call):
        name = f"call of {op.fn}"
    if op.place is None:
        return name
    ranks = op.place.ranks
    return f"{name} on rank {ranks[0]}" if len(ranks) == 1 else f"{name} on {format_ranks(ranks)}"
