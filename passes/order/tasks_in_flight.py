"""Let a rank begin a task while the exchanges of an earlier one travel.

A task of a group is a row of calls with exchanges between them: experts' rows go out and come back,
summands are reduced. If a rank's tasks follow one another, it waits for each exchange in place.
With two tasks in flight it computes calls of the next task meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from ...ir.attributes import Action, Task
from ...ir.ops import Call, Collective
from ...ir.ops.module import Function, Module
from .work import ProgramWork

_MOVES, _READY, _CHOICE, _OUTSIDE = range(4)
"""The kinds of events of one time, in the order in which they happen: a node without cost starts, a
node of a task may start, a rank chooses one of these, and a call outside of tasks starts."""

TASK = 1 << 20
"""The time of a forward, or of half a backward, in units that calls of a task can share."""

_Event: TypeAlias = tuple[int, int, int]
"""A time, a kind, and the index of a node or the number of a queue."""


@dataclass(slots=True)
class _QueuedTask:
    """A task of a rank, and how far it has come.

    Attributes:
        nodes: the nodes that run in the rank's turn, in order: calls, and late collectives.
        functions: the functions that they call, by name.
        at: how many of them have started.
    """

    nodes: Sequence[int]
    functions: tuple[str, ...]
    at: int = 0

    @property
    def rest(self) -> Sequence[int]:
        """The nodes that have not started."""
        return self.nodes[self.at :]


@dataclass(slots=True)
class _RankQueue:
    """The tasks of a rank, or of a group that counts as one, in the order of the schedule.

    Attributes:
        oldest: the position of the first task that has not ended.
        busy_until: the time at which the node that runs ends.
    """

    tasks: list[_QueuedTask] = field(default_factory=list)
    oldest: int = 0
    busy_until: int = 0

    def open_tasks(self, limit: int) -> Sequence[_QueuedTask]:
        """Those that are in flight, or may be: the first `limit` that have not ended."""
        tasks = self.tasks
        while self.oldest < len(tasks) and not tasks[self.oldest].rest:
            self.oldest += 1
        return tasks[self.oldest : self.oldest + limit]


def overlapped_starts(
    module: Module, work: ProgramWork, rows: Iterable[Sequence[Task]], limit: int
) -> dict[int, int]:
    """The start of each node, in the order of starts, with up to `limit` tasks of a rank in flight.

    A rank's tasks begin in the order of the schedule. When the rank is free, it starts the next
    node of the oldest task that can go on; so the oldest task is never held up by more than one
    call. The oldest task of all can always go on if tasks that follow one another have no circle.

    A task that adds to gradients does so behind the older tasks that add to the same ones.
    Gradients of later microbatches would else be added before those of earlier ones, and sums
    would be rounded differently.

    Times are not known here. All forwards are taken to last as long, and so are the halves of a
    backward; the calls of a task share its time. An exchange of a microbatch is taken to last as
    long as a call of the task that has most of them.

    Source: list scheduling, Graham 1966.

    Args:
        module: the module of the work.
        work: the nodes, whose tasks have an order without a circle.
        rows: for each rank the tasks in its order; a rank has one row for each round.
        limit: at least 2.
    """
    return _Run(module, work, rows, limit).all()


class _Run:
    """A run of all nodes on paper."""

    def __init__(
        self, module: Module, work: ProgramWork, rows: Iterable[Sequence[Task]], limit: int
    ) -> None:
        self._work = work
        self._ops = work.program.ops
        self._limit = limit
        self._gradients = GradientOrder(module, work)
        is_split = any(task.action is Action.WEIGHT for task in work.anchors)
        self._doubled = None if is_split else Action.BACKWARD
        self._exchange = TASK // max(map(len, work.anchors.values()), default=1)
        self._queues: list[_RankQueue] = []
        self._queue_of: dict[int, int] = {}
        self._ready: set[int] = set()
        self._times: dict[int, int] = {}
        self._heap: list[_Event] = []
        late: dict[Task, list[int]] = {}
        for node in work.late:
            task = self._ops[node].task
            if task is not None:
                late.setdefault(task, []).append(node)
        for row in rows:
            self._add_queue(row, late)
        self._count = [0] * len(self._ops)
        self._start = [0] * len(self._ops)
        self._followers: list[list[int]] = [[] for _ in self._ops]
        for node in work.nodes:
            self._count[node] = len(work.follows[node])
            for followed in work.follows[node]:
                self._followers[followed].append(node)

    def _add_queue(self, row: Sequence[Task], late: dict[Task, list[int]]) -> None:
        number, queue = len(self._queues), _RankQueue()
        self._queues.append(queue)
        for task in row:
            anchors = self._work.anchors.get(task)
            if anchors is not None:
                nodes = sorted({*anchors, *late.get(task, ())})
                calls = [self._ops[node] for node in nodes]
                functions = tuple(op.fn.name for op in calls if isinstance(op, Call))
                queue.tasks.append(_QueuedTask(nodes, functions))
                self._queue_of.update(dict.fromkeys(nodes, number))

    def all(self) -> dict[int, int]:
        """Run it."""
        self._heap = [(0, self._kind(i), i) for i in self._work.nodes if not self._count[i]]
        heapify(self._heap)
        while self._heap:
            time, kind, index = heappop(self._heap)
            if kind == _CHOICE:
                self._choose(self._queues[index], index, time)
            elif kind == _READY:
                self._ready.add(index)
                number = self._queue_of[index]
                until = self._queues[number].busy_until
                heappush(self._heap, (max(time, until), _CHOICE, number))
            else:
                self._begin(index, time, self._duration(index))
        assert len(self._times) == len(self._work.nodes), "tasks in a row have no circle"
        return self._times

    def _kind(self, node: int) -> int:
        if node in self._queue_of:
            return _READY
        return _OUTSIDE if node in self._work.costs else _MOVES

    def _duration(self, node: int) -> int:
        """The time from the start of a node to that of what follows it."""
        op = self._ops[node]
        anchors = self._work.anchors.get(op.task, ()) if op.task is not None else ()
        if node in self._work.costs:
            halves = 2 if op.task is not None and op.task.action is self._doubled else 1
            return halves * TASK // max(len(anchors), 1)
        is_exchange = isinstance(op, Collective) and op.mb is not None and not self._is_stored(node)
        return self._exchange if is_exchange else 0

    def _is_stored(self, node: int) -> bool:
        """True if `prefetch` places a node: it gathers parameters, or reduces gradients."""
        return node in self._work.ahead or node in self._work.behind

    def _choose(self, queue: _RankQueue, number: int, time: int) -> None:
        """Start the nodes of a rank that can start now."""
        while queue.busy_until <= time:
            task = self._next_task(queue)
            if task is None:
                return
            node = task.nodes[task.at]
            task.at += 1
            duration = self._duration(node)
            if isinstance(self._ops[node], Call):
                queue.busy_until = time + duration
            self._begin(node, time, duration)
        heappush(self._heap, (queue.busy_until, _CHOICE, number))

    def _next_task(self, queue: _RankQueue) -> _QueuedTask | None:
        """The oldest task that can go on."""
        tasks = queue.open_tasks(self._limit)
        for position, task in enumerate(tasks):
            if not task.rest:
                continue
            if task.nodes[task.at] in self._ready and self._gradients.allow(task, tasks[:position]):
                return task
            if not task.at:  # tasks begin in order
                return None
        return None

    def _begin(self, node: int, time: int, duration: int) -> None:
        self._times[node] = time
        end = time + duration
        for follower in self._followers[node]:
            self._start[follower] = max(self._start[follower], end)
            self._count[follower] -= 1
            if not self._count[follower]:
                event = (self._start[follower], self._kind(follower), follower)
                heappush(self._heap, event)


class GradientOrder:
    """Keeps the order in which tasks add to gradients."""

    def __init__(self, module: Module, work: ProgramWork) -> None:
        self._ops = work.program.ops
        self._functions = module.functions

    def allow(self, task: _QueuedTask, older: Sequence[_QueuedTask]) -> bool:
        """True if the next node of a task may start before older tasks have ended."""
        function = self._adding(task.nodes[task.at])
        return function is None or not any(self._waits(task, function, other) for other in older)

    def _waits(self, task: _QueuedTask, function: Function, older: _QueuedTask) -> bool:
        """True if an older task has yet to add to gradients that the next node adds to."""
        adding = [self._adding(node) for node in older.rest]
        common = [other for other in adding if other is not None and _add_up(function, other)]
        if not common:
            return False
        # Of one call of a method, each part adds to gradients of its own. So it is enough that the
        # parts of the older call keep ahead of the same parts of the later one.
        method = _method(function)
        is_called_once = len(set(task.functions)) == len(task.functions)
        if task.functions != older.functions or not is_called_once:
            return True
        return older.at <= task.at or any(_method(other) != method for other in common)

    def _adding(self, node: int) -> Function | None:
        """The function of a node, if it adds to gradients."""
        op = self._ops[node]
        function = self._functions[op.fn.name] if isinstance(op, Call) else None
        return function if function is not None and function.effect.is_on_gradients else None


def _method(part: Function) -> str:
    """The name of the function that a function is a part of, by its own name."""
    return part.name.rpartition(".")[0]


def _add_up(one: Function, other: Function) -> bool:
    """True if two functions may add to the same gradient."""
    if one.actor == other.actor:
        return not set(one.gradient_buckets).isdisjoint(other.gradient_buckets)
    states = {state for state, effect in one.touches if effect.is_on_gradients}
    return any(state in states for state, effect in other.touches if effect.is_on_gradients)
