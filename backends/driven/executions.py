"""Start, move on and end the executions of all graphs of a world, in one process.

Nothing here runs by itself: the driver's executions go on while it is in a call, those of the other
ranks while they serve.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final

from ..errors import CapacityError, StepTimeout
from ..failures.flight import ASKING, Activity, where_ranks_are
from ..failures.interruptions import is_interruption
from .commands import GRAPHS, Action, Command, CommandKind, CommandQueue, CommandTransport
from .futures import Future
from .graphs import DrivenGraph
from .outcomes import Outcome, Waiting
from .rank_scheduler import RankScheduler
from .restart import RESTART_STATES, RestartEpochs, RestartState, cannot_start_over, give_up, reset
from .timeouts import (
    is_full,
    late_end,
    late_restart,
    late_start,
    records_in_flight,
    seconds,
)

_PEEK_EVERY: Final = 64
"""After how many fruitless turns in a row the driver looks for failures ahead of its programs."""


class Executions:
    """All graphs of a world.

    Args:
        ranks: those that this process plays.
        commands: makes the transport of commands from a driver to the other ranks.
        waiting: how to wait.
        epochs: how all ranks start over after an interruption; None if they cannot.
        shuffle: as in `RankScheduler`.
        on_departure: called with each exception for the whole process that a method has raised.

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
        commands: Callable[[int], CommandTransport],
        waiting: Waiting,
        epochs: RestartEpochs | None,
        shuffle: random.Random | None = None,
        on_departure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.schedulers = {rank: RankScheduler(rank, shuffle) for rank in ranks}
        self.graphs: dict[int, DrivenGraph] = {}
        self.driver: int | None = None
        self._make_commands = commands
        self._commands: dict[int, CommandTransport] = {}
        self._waiting = waiting
        self._random = shuffle
        self._numbers = 0
        self._closings = 0
        self._all = tuple(self.schedulers.values())
        self._queues: tuple[CommandQueue, ...] = ()
        self._all_queues: dict[int, tuple[CommandQueue, ...]] = {}
        self._due: deque[Future] = deque()
        self.has_due = False
        self._epochs = epochs
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
        if driver not in self._commands:
            commands = self._commands[driver] = self._make_commands(driver)
            self._all_queues[driver] = tuple(
                CommandQueue(rank, commands.reader(rank), self._decode)
                for rank in self.schedulers
                if rank != driver
            )
        self._queues = self._all_queues[driver]

    def open(self, graph: DrivenGraph) -> None:
        """Enter a graph; all ranks do, in the same order.

        Raises:
            RuntimeError: there have been too many.
        """
        if self._numbers == GRAPHS:
            raise RuntimeError(f"a program can compile no more than {GRAPHS} graphs")
        graph.number, self._numbers = self._numbers, self._numbers + 1
        self.graphs[graph.number] = graph

    def close(self, graph: DrivenGraph, at_once: bool = False) -> None:
        """On the driver: end the graph's executions, then the graph, on all ranks.

        Args:
            graph: the graph to end.
            at_once: True to wait for nothing that is in flight.

        Raises:
            StepTimeout: nothing has moved for as long as the graph's limit says.
            TransportError: a rank has ended.
        """
        if graph.driver in graph.closed:
            return
        limit = 0.0 if at_once else graph.limit
        if not self._until(lambda: not (graph.in_flight or self.in_doubt), limit, moving=True):
            graph.overdue = True
            raise self._timeout(late_end(graph), graph.limit)
        others = [rank for rank in range(graph.world) if rank != graph.driver]
        publish = self._commands[graph.driver].publisher(others, others)
        publish(Command(CommandKind.CLOSE, graph.number).pack())
        self._release(graph, graph.driver)
        while self._queues and self.turn():
            pass

    def serve(self, graph: DrivenGraph) -> None:
        """On any other rank: run what the driver asks for, of all graphs, until this one closes.

        Raises:
            TransportError: a rank has ended.
        """
        ranks = [queue.rank for queue in self._queues if queue.rank in graph.contexts]
        pause = self._waiting.pause
        polls, closings = 0, -1
        with self._waiting.serving():
            while True:
                if closings != self._closings and not self.in_doubt:
                    closings = self._closings
                    if graph.closed.issuperset(ranks):
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
        """True if no execution is in progress on the ranks of this process."""
        for scheduler in self._all:  # noqa: SIM110 # a generator would cost half a microsecond
            if scheduler.in_flight:
                return False
        return True

    # -- executions -------------------------------------------------------------------------

    def publisher(self, graph: DrivenGraph) -> Callable[[int], None]:
        """Make the function by which the driver tells the participants of a graph of a command."""
        return self._commands[graph.driver].publisher(sorted(graph.participants), graph.wake)

    def turn(self) -> bool:
        """Do the next commands, and go on with executions in flight; true if anything has moved.

        Raises:
            TransportError: an interruption has left executions in doubt that cannot start over.
        """
        if self.in_doubt:
            return self._start_over()
        moved = False
        try:
            for queue in self._queues:
                while queue.take():
                    moved = True
            schedulers: Sequence[RankScheduler] = self._all
            if self._random is not None:
                schedulers = self._random.sample(
                    schedulers, self._random.randint(1, len(schedulers))
                )
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
        """Go on until a future is done, or `timeout` seconds have passed; None sets no limit."""
        limit = None if timeout is None else seconds(timeout)
        if limit is not None:
            if not self._until(lambda: future.is_done, limit):
                late = f"execution {future.execution} has not ended after {limit:g} s"
                raise self._timeout(late, limit)
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
        """Call the callbacks of a future that is done, as soon as no instruction is running."""
        self._due.append(future)
        self.has_due = True

    def watch(self, future: Future) -> Generator[Any, None, None]:
        """Let an event loop wait for a future, for `await`."""
        return self._waiting.watch(self._turn_and_peek, future)

    # -- moving on --------------------------------------------------------------------------

    def doing(self) -> Activity | None:
        """Describe the executions in flight in this process, if any; for another thread."""
        records = records_in_flight(self._all)
        threads = [scheduler.thread for scheduler in self._all if scheduler.thread]
        return Activity(where_ranks_are(records).strip(), *threads[:1]) if records else None

    def _timeout(self, late: str, waited: float | None) -> StepTimeout:
        """Make the error of a caller that has waited, with the positions of executions in flight.

        Other ranks get no longer to answer than the caller has waited.
        """
        busy = (graph for graph in self.graphs.values() if graph.in_flight)
        ranks = sorted({rank for graph in busy for rank in graph.participants})
        allowed = min(waited or 0.0, ASKING)
        others = [rank for rank in ranks if rank not in self.schedulers] if allowed else []
        where = self._waiting.where(others, records_in_flight(self._all), seconds=allowed)
        return StepTimeout(f"{late}\n{where}".rstrip())

    def _until(
        self, done: Callable[[], bool], timeout: float | None = None, moving: bool = False
    ) -> bool:
        """Go on until `done`, or the time is up; true if it is done.

        Args:
            done: returns whether to end.
            timeout: seconds; None for no limit.
            moving: True to count the seconds from the last move on.
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
        """Fail the futures of failed executions before the driver's program comes to the error."""
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

    def make_room(self, graph: DrivenGraph, block: bool) -> None:
        """Return when the graph has a free execution context.

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
            raise self._timeout(late_restart(graph), graph.limit)
        elif not self._until(lambda: not self.in_doubt and bool(graph.free), graph.patience):
            raise self._timeout(late_start(graph), graph.patience)

    def _decode(self, rank: int, command: Command) -> Action:
        """The action of a command on a rank."""
        if command.kind is CommandKind.CLOSE:
            return partial(self._close_here, command.graph, rank)
        graph = self.graphs[command.graph]
        context = graph.contexts[rank][command.context]
        instance, siblings = context.instances[command.variant], context.instances
        started, scheduler = graph.started, self.schedulers[rank]

        def begin() -> bool:
            for sibling in siblings:
                if sibling.running:
                    return False
            number = started[rank]
            # Counted first: an interruption may be taken as a method's failure, and the execution
            # goes on.
            started[rank] = number + 1
            scheduler.begin(instance, (), number)
            return True

        return begin

    def _close_here(self, number: int, rank: int) -> bool:
        graph = self.graphs.get(number)
        if graph is None or rank in graph.closed:
            return True  # an interrupted driver has sent the command again
        if not graph.is_idle(rank):
            return False
        self._release(graph, rank)
        return True

    def _release(self, graph: DrivenGraph, rank: int) -> None:
        graph.release(rank)
        self._closings += 1
        for queue in self._queues:
            if queue.rank == rank:
                queue.forget(graph.number)
        if len(graph.closed) == len(graph.contexts):
            del self.graphs[graph.number]

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
        """Find out if `error`, which has come out of moving executions on, leaves them in doubt."""
        self._doubt = f"{type(error).__name__}: {error}".removesuffix(": ")
        if any(scheduler.has_kept(error) for scheduler in self._all):
            self.in_doubt = False  # a method has failed, and its execution goes on
            if self._on_departure is not None:
                self._on_departure(error)
        elif any(scheduler.is_busy for scheduler in self._all) and not is_interruption(error):
            self.in_doubt = False  # a method has made a call that it must not make

    def _reset(self, epochs: RestartEpochs) -> None:
        """Bring the transports of messages and commands, now unused, back to their beginning."""
        for queue in self._queues:
            while number := queue.drop():
                command = Command.unpack(number)
                if command.kind is CommandKind.CLOSE:
                    self._close_here(command.graph, queue.rank)
        for graph in self.graphs.values():
            reset(graph)
        if self.driver in self.schedulers:
            self._commands[self.driver].mend()
            epochs.tell(max((graph.count for graph in self.graphs.values()), default=0))

    def _hear(self) -> None:
        """Start over if another rank does."""
        if self._epochs is not None and self._epochs.is_wanted(self.driver or 0):
            self.in_doubt = True

    def _start_over(self) -> bool:
        """Go through the next epoch, if all ranks have gone through the one before."""
        epochs = self._epochs
        if epochs is None or any(graph.cannot_restart for graph in self.graphs.values()):
            raise cannot_start_over(self._doubt)
        at = epochs.mine
        state = at % RESTART_STATES
        if state and epochs.missing(at):
            return False
        if state == RestartState.STOPPED:
            self._reset(epochs)
        elif state == RestartState.RESET:
            number = epochs.told(self.driver or 0)
            for graph in self.graphs.values():
                graph.go_on_from(number, graph.started)
        elif self.graphs:
            for graph in self.graphs.values():
                give_up(graph, self._doubt)
            for scheduler in self._all:
                scheduler.give_up()
        else:
            self.in_doubt = False
            return True
        epochs.reach(at + 1)
        if state == RestartState.RESET:
            self.in_doubt = False
        return True
