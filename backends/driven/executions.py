"""The executions of all graphs of a world, as one process sees them: start, move on, end.

Nothing here runs by itself: the driver's executions go on while it is in a call, those of the other
ranks while they serve.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic
from typing import Any, Final, Protocol

from ..errors import CapacityError, StepTimeout
from ..failures.flight import Doing, Sight
from ..failures.interruptions import is_interruption
from ..failures.timeouts import (
    is_full,
    late_end,
    late_restart,
    late_start,
    positions_in_flight,
    seconds,
)
from .command_queue import Inbox, Order
from .futures import Future
from .graphs import Graph
from .outcomes import Outcome
from .rank_scheduler import RankScheduler
from .records import GRAPHS, SEATS, Kind, Record, Records
from .restart import STAGES, Stage, Stages, cannot_start_over, give_up, reset

_ASKING: Final = 0.5
"""Seconds at most that other ranks get to say where they are, when an execution is late."""

_PEEK_EVERY: Final = 64
"""After how many fruitless turns in a row the driver looks for failures ahead of its programs."""


class Waiting(Protocol):
    """How a process waits when nothing moves, and learns that others have ended."""

    def pause(self, polls: int, seconds: float | None) -> None:
        """Give way after `polls` fruitless turns in a row, for no longer than `seconds`.

        Raises:
            TransportError: a rank has ended that executions need.
        """

    def rest(self) -> None:
        """The wait is over: nobody needs to wake this process."""

    def look(self, ranks: Sequence[int], seconds: float) -> Mapping[int, Sight]:
        """Ask ranks of other processes what they do; see `MpiWorld` in `backends/cpu/node.py`."""

    def serving(self) -> AbstractContextManager[object]:
        """Around the time in which this process serves."""

    def watch(self, turn: Callable[[], bool], future: Future) -> Generator[Any, None, None]:
        """Wait for a future inside an asyncio event loop."""


class Executions:
    """All graphs of a world.

    Args:
        ranks: those that this process plays.
        records: from the driver to the other ranks; made when the driver is known.
        waiting: how to wait.
        stages: how all ranks start over after an interruption; None if they cannot.
        shuffle: as in `RankScheduler`.
        on_departure: told of each exception for the whole process that a method has raised.

    Attributes:
        schedulers: the ranks that this process plays.
        graphs: the open ones, by number.
        driver: the rank that starts executions.
        has_due: whether futures are done whose callbacks have not been called.
        in_doubt: whether an interruption has left something half done, so that all ranks have to
            start over (`restart.py`) before anything else.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        records: Callable[[int], Records],
        waiting: Waiting,
        stages: Stages | None,
        shuffle: random.Random | None = None,
        on_departure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.schedulers = {rank: RankScheduler(rank, shuffle) for rank in ranks}
        self.graphs: dict[int, Graph] = {}
        self.driver: int | None = None
        self._make_records = records
        self._records: dict[int, Records] = {}
        self._waiting = waiting
        self._random = shuffle
        self._numbers = 0
        self._closings = 0
        self._all = tuple(self.schedulers.values())
        self._inboxes: tuple[Inbox, ...] = ()
        self._all_inboxes: dict[int, tuple[Inbox, ...]] = {}
        self._due: deque[Future] = deque()
        self.has_due = False
        self._stages = stages
        self._on_departure = on_departure
        self._doubt = "on another rank"
        self.in_doubt = False

    # -- graphs -----------------------------------------------------------------------------

    def claim(self, driver: int) -> None:
        """Let `driver` start executions; all ranks call it alike, before they open a graph.

        Raises:
            RuntimeError: open graphs have another driver.
        """
        if self.graphs and self.driver != driver:
            names = ", ".join(sorted(f"'{graph.name}'" for graph in self.graphs.values()))
            raise RuntimeError(
                f"rank {self.driver} drives the open graphs {names}, so rank {driver} cannot drive "
                f"another: close those first, or compile this one with inputs=cg.on({self.driver})"
            )
        self.driver = driver
        if driver not in self._records:
            records = self._records[driver] = self._make_records(driver)
            self._all_inboxes[driver] = tuple(
                Inbox(rank, records.reader(rank), self._understand)
                for rank in self.schedulers
                if rank != driver
            )
        self._inboxes = self._all_inboxes[driver]

    def open(self, graph: Graph) -> None:
        """Enter a graph; all ranks do, in the same order.

        Raises:
            RuntimeError: there have been too many.
        """
        if self._numbers == GRAPHS:
            raise RuntimeError(f"a program can compile no more than {GRAPHS} graphs")
        graph.number, self._numbers = self._numbers, self._numbers + 1
        self.graphs[graph.number] = graph

    def close(self, graph: Graph, at_once: bool = False) -> None:
        """On the driver: end the graph's executions, then the graph, on all ranks.

        Args:
            graph: which.
            at_once: whether to wait for nothing that is in flight.

        Raises:
            StepTimeout: nothing has moved for as long as the graph's limit says.
            TransportError: a rank has ended.
        """
        if graph.driver in graph.closed:
            return
        limit = 0.0 if at_once else graph.limit
        if not self._until(lambda: not (graph.in_flight or self.in_doubt), limit, moving=True):
            graph.overdue = True
            raise StepTimeout("\n".join([late_end(graph), *self._positions(graph.limit)]))
        others = [rank for rank in range(graph.world) if rank != graph.driver]
        publish = self._records[graph.driver].publisher(others, others)
        publish(Record(Kind.CLOSE, graph.number).pack())
        self._release(graph, graph.driver)
        while self._inboxes and self.turn():
            pass

    def serve(self, graph: Graph) -> None:
        """On any other rank: run what the driver asks for, of all graphs, until this one closes.

        Raises:
            TransportError: a rank has ended.
        """
        mine = [inbox.rank for inbox in self._inboxes if inbox.rank in graph.seats]
        pause = self._waiting.pause
        polls, closings = 0, -1
        with self._waiting.serving():
            while True:
                if closings != self._closings and not self.in_doubt:
                    closings = self._closings
                    if graph.closed.issuperset(mine):
                        break
                if self.turn():
                    polls = 0
                else:
                    polls += 1
                    if polls > _PEEK_EVERY:
                        self._hear()
                    pause(polls, None)
        self._waiting.rest()

    @property
    def is_idle(self) -> bool:
        """Whether no execution is in progress on the ranks of this process."""
        for scheduler in self._all:  # noqa: SIM110 # a generator would cost half a microsecond
            if scheduler.in_flight:
                return False
        return True

    # -- executions -------------------------------------------------------------------------

    def launcher(self, graph: Graph) -> Launcher:
        """Starts executions of an open graph; for the driver."""
        to = sorted(graph.participants)
        publish = self._records[graph.driver].publisher(to, graph.wake)
        return Launcher(self, graph, publish, self.schedulers[graph.driver])

    def turn(self) -> bool:
        """See `Progress`.

        Raises:
            TransportError: an interruption has left executions in doubt that cannot start over.
        """
        if self.in_doubt:
            return self._start_over()
        moved = False
        try:
            for inbox in self._inboxes:
                while inbox.take():
                    moved = True
            schedulers = self._all if self._random is None else self._shuffled()
            for scheduler in schedulers:
                if scheduler.in_flight and scheduler.turn():
                    moved = True
        except BaseException as error:
            self.in_doubt = True
            self.judge(error)
            raise
        if self.has_due:
            self.call_back()
        return moved

    def wait(self, future: Outcome, timeout: object) -> None:
        """See `Progress`."""
        limit = None if timeout is None else seconds(timeout)
        if limit is not None:
            if not self._until(lambda: future.is_done, limit):
                late = f"execution {future.execution} has not ended after {limit:g} s"
                raise StepTimeout("\n".join([late, *self._positions(limit)]))
            return
        pause = self._waiting.pause
        polls = 0
        while not future.is_done:
            if self.turn():
                polls = 0
            else:
                polls += 1
                if not polls % _PEEK_EVERY:
                    self._peek_errors()
                pause(polls, None)
        if polls > 1:
            self._waiting.rest()

    def later(self, future: Future) -> None:
        """See `Progress`."""
        self._due.append(future)
        self.has_due = True

    def watch(self, future: Future) -> Generator[Any, None, None]:
        """See `Progress`."""
        return self._waiting.watch(self._turn_and_peek, future)

    # -- moving on --------------------------------------------------------------------------

    def doing(self) -> Doing | None:
        """What the ranks of this process do, if executions are in flight; for another thread."""
        lines = positions_in_flight(self._all)
        threads = [scheduler.thread for scheduler in self._all if scheduler.thread]
        return Doing("\n".join(lines).strip(), *threads[:1]) if lines else None

    def _positions(self, waited: float | None) -> list[str]:
        """Where the executions in flight are on all ranks that they need.

        The others are asked for no longer than the caller has waited by now.
        """
        busy = (graph for graph in self.graphs.values() if graph.in_flight)
        ranks = sorted({rank for graph in busy for rank in graph.participants})
        allowed = min(waited or 0.0, _ASKING)
        if not allowed:
            return positions_in_flight(self._all)
        sights = dict(self._waiting.look(ranks, allowed))
        for rank in set(ranks) - set(self.schedulers) - set(sights):
            sights[rank] = Sight(f"rank {rank} cannot be asked, as those of other machines")
        return positions_in_flight(self._all, sights)

    def _until(
        self, done: Callable[[], bool], timeout: float | None = None, moving: bool = False
    ) -> bool:
        """Go on until `done`, or the time is up; which of the two.

        Args:
            done: whether to end.
            timeout: seconds; None for no limit.
            moving: whether they count from the last move on.
        """
        deadline = None if timeout is None else monotonic() + timeout
        polls = 0
        left: float | None = None
        while not done():
            if self.turn():
                polls = 0
                if moving and timeout is not None:
                    deadline = monotonic() + timeout
                continue
            if deadline is not None:
                left = deadline - monotonic()
                if left <= 0:
                    return False
            polls += 1
            if not polls % _PEEK_EVERY:
                self._peek_errors()
            self._waiting.pause(polls, left)
        self._waiting.rest()
        return True

    def _turn_and_peek(self) -> bool:
        moved = self.turn()
        if not moved:
            self._peek_errors()
        return moved

    def _peek_errors(self) -> None:
        """Let futures fail whose executions have, before the driver's program comes to it."""
        self._hear()
        scheduler = None if self.driver is None else self.schedulers.get(self.driver)
        try:
            for instance in tuple(scheduler.in_flight) if scheduler is not None else ():
                instance.peek_errors()
        except BaseException as error:
            self.in_doubt = True
            self.judge(error)
            raise
        if self.has_due:
            self.call_back()

    def make_room(self, graph: Graph, block: bool) -> None:
        """Return when the graph has a free seat.

        Raises:
            CapacityError: it has none, or ranks start over, and `block` is false.
            StepTimeout: it has none by the graph's deadline, or ranks do not start over.
        """
        self.turn()
        if not block:
            if self.in_doubt:
                again = "call execute again a little later, or with block=True"
                raise CapacityError(f"ranks start over after an interruption: {again}")
            if not graph.free:
                raise CapacityError(
                    f"{is_full(graph)}: take a result first, or compile it with a larger "
                    "max_inflight"
                )
        elif not self._until(lambda: not self.in_doubt, graph.limit):
            raise StepTimeout("\n".join([late_restart(graph), *self._positions(graph.limit)]))
        elif not self._until(lambda: not self.in_doubt and bool(graph.free), graph.patience):
            raise StepTimeout("\n".join([late_start(graph), *self._positions(graph.patience)]))

    def _understand(self, rank: int, record: Record) -> Order:
        """What to do for a record."""
        if record.kind is Kind.CLOSE:
            return partial(self._close_here, record.graph, rank)
        graph = self.graphs[record.graph]
        seat = graph.seats[rank][record.seat]
        instance, siblings = seat.instances[record.variant], seat.instances
        started, scheduler = graph.started, self.schedulers[rank]

        def begin() -> bool:
            for other in siblings:
                if other.running:
                    return False
            number = started[rank]
            # First: an interruption may be the failure of a method, and the execution goes on.
            started[rank] = number + 1
            scheduler.begin(instance, (), number)
            return True

        return begin

    def _close_here(self, number: int, rank: int) -> bool:
        graph = self.graphs.get(number)
        if graph is None or rank in graph.closed:
            return True  # the driver was interrupted when it said so, and has said it again
        if not graph.is_idle(rank):
            return False
        self._release(graph, rank)
        return True

    def _release(self, graph: Graph, rank: int) -> None:
        graph.release(rank)
        self._closings += 1
        for inbox in self._inboxes:
            if inbox.rank == rank:
                inbox.forget(graph.number)
        if len(graph.closed) == len(graph.seats):
            del self.graphs[graph.number]

    def _shuffled(self) -> tuple[RankScheduler, ...]:
        assert self._random is not None
        return tuple(self._random.sample(self._all, self._random.randint(1, len(self._all))))

    def call_back(self) -> None:
        """Call the callbacks of futures that are done."""
        due, self.has_due = self._due, False
        try:
            while due:
                future = due[0]
                future.call_back()
                if due and due[0] is future:
                    due.popleft()
        finally:
            if due:  # after an interruption
                self.has_due = True

    # -- after an interruption --------------------------------------------------------------

    def judge(self, error: BaseException) -> None:
        """Whether `error`, which has come out of moving executions on, leaves them in doubt."""
        self._doubt = f"{type(error).__name__}: {error}".removesuffix(": ")
        if any(scheduler.has_kept(error) for scheduler in self._all):
            self.in_doubt = False  # a method has failed, and its execution goes on
            if self._on_departure is not None:
                self._on_departure(error)
        elif any(scheduler.is_busy for scheduler in self._all) and not is_interruption(error):
            self.in_doubt = False  # a method has asked for what it must not ask for

    def _reset(self, stages: Stages) -> None:
        """Bring what carries messages and records back to its beginning; nobody uses it now."""
        for inbox in self._inboxes:
            while record := inbox.drop():
                asked = Record.unpack(record)
                if asked.kind is Kind.CLOSE:
                    self._close_here(asked.graph, inbox.rank)
        for graph in self.graphs.values():
            reset(graph)
        if self.driver in self.schedulers:
            self._records[self.driver].mend()
            stages.tell(max((graph.count for graph in self.graphs.values()), default=0))

    def _go_on_from(self, number: int) -> None:
        """Give the next execution of every graph this number, which random numbers depend on."""
        for graph in self.graphs.values():
            graph.count = number
            for rank in graph.started:
                graph.started[rank] = number

    def _hear(self) -> None:
        """Start over if another rank does."""
        if self._stages is not None and self._stages.is_wanted(self.driver or 0):
            self.in_doubt = True

    def _start_over(self) -> bool:
        """Go through the next stage, if all ranks have gone through the one before."""
        stages = self._stages
        if stages is None or any(graph.cannot_restart for graph in self.graphs.values()):
            raise cannot_start_over(self._doubt)
        at = stages.mine
        stage = at % STAGES
        if stage and stages.missing(at):
            return False
        if stage == Stage.STOPPED:
            self._reset(stages)
        elif stage == Stage.RESET:
            self._go_on_from(stages.told(self.driver or 0))
        elif self.graphs:
            for graph in self.graphs.values():
                give_up(graph, self._doubt)
            for scheduler in self._all:
                scheduler.give_up()
        else:
            self.in_doubt = False
            return True
        stages.reach(at + 1)
        if stage == Stage.RESET:
            self.in_doubt = False
        return True


class Launcher:
    """Starts executions of one graph on its driver."""

    def __init__(
        self,
        executions: Executions,
        graph: Graph,
        publish: Callable[[int], None],
        scheduler: RankScheduler,
    ) -> None:
        self._executions = executions
        self._graph = graph
        self._publish = publish
        self._scheduler = scheduler
        self._instances = [seat.instances for seat in graph.seats[graph.driver]]
        self._record = Record(Kind.EXECUTE, graph.number).pack()
        self._spare: list[Future] = []

    def __call__(self, variant: int, inputs: Sequence[Any], block: bool) -> Future:
        """Start an execution.

        Args:
            variant: for which signature.
            inputs: values for the parameters of the driver's program, checked.
            block: whether to wait if the graph is at its capacity.

        Raises:
            CapacityError: the graph is at its capacity, and `block` is false.
            StepTimeout: the graph is at its capacity until its deadline.
            RuntimeError: another thread uses this rank's graphs, or a method that an execution
                calls is running on it.
            TransportError: a rank has ended.
        """
        graph, executions = self._graph, self._executions
        self._scheduler.check_idle()
        if executions.in_doubt or not graph.free:
            executions.make_room(graph, block)
        try:
            number = graph.count
            graph.count = number + 1
            seat = graph.free.pop()
            # The others are told first: they come on their way while all else is done here.
            self._publish(self._record + variant * SEATS + seat)
            future = self._spare.pop() if self._spare else Future(executions, number)
            future.execution = number
            graph.futures[seat] = future
            self._scheduler.begin(self._instances[seat][variant], inputs, number)
        except BaseException as error:
            executions.in_doubt = True
            executions.judge(error)
            raise
        if executions.has_due:
            executions.call_back()
        self._spare.append(Future(executions, -1))  # the next one's, while the others work
        return future
