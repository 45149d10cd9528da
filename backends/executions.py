"""The executions of all graphs of a world, as one process sees them: start, move on, end.

Nothing here runs by itself: the driver's executions go on while it is in a call, those of the other
ranks while they serve.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Any, Protocol

from .errors import DeadlockError, StepTimeout
from .flight import FlightRecord
from .futures import CapacityError, Future
from .graphs import Graph
from .records import GRAPHS, SEATS, VARIANTS, Kind, Record, Records, VirtualRecords
from .resident import Resident


class Waiting(Protocol):
    """How a process waits when nothing moves, and learns that others have ended."""

    def pause(self, polls: int, seconds: float | None) -> None:
        """Give way after `polls` fruitless turns in a row, for no longer than `seconds`.

        Raises:
            TransportError: a rank has ended that executions need.
        """

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
        shuffle: as in `Resident`.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        records: Callable[[int], Records],
        waiting: Waiting,
        shuffle: random.Random | None = None,
    ) -> None:
        self.residents = {rank: Resident(rank, shuffle) for rank in ranks}
        self.graphs: dict[int, Graph] = {}
        self.driver: int | None = None
        self._make_records = records
        self._records: dict[int, Records] = {}
        self._waiting = waiting
        self._random = shuffle
        self._numbers = 0
        self._held: dict[int, Record] = {}
        self._readers: dict[int, Callable[[], int]] = {}
        self._all_readers: dict[int, dict[int, Callable[[], int]]] = {}
        self._due: deque[Future] = deque()

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
            self._all_readers[driver] = {
                rank: records.reader(rank) for rank in self.residents if rank != driver
            }
        self._readers = self._all_readers[driver]

    def open(self, graph: Graph) -> None:
        """Enter a graph; all ranks do, in the same order.

        Raises:
            RuntimeError: there have been too many.
        """
        if self._numbers == GRAPHS:
            raise RuntimeError(f"a program can compile no more than {GRAPHS} graphs")
        graph.number, self._numbers = self._numbers, self._numbers + 1
        self.graphs[graph.number] = graph

    def close(self, graph: Graph) -> None:
        """On the driver: end the graph's executions, then the graph, on all ranks.

        Raises:
            TransportError: a rank has ended.
        """
        if graph.driver in graph.closed:
            return
        self._until(lambda: not graph.in_flight)
        self._records[graph.driver].put(Record(Kind.CLOSE, graph.number).pack())
        self._release(graph, graph.driver)
        while self._readers and self.turn():
            pass

    def serve(self, graph: Graph) -> None:
        """On any other rank: run what the driver asks for, of all graphs, until this one closes.

        Raises:
            TransportError: a rank has ended.
        """
        mine = [rank for rank in self._readers if rank in graph.seats]
        with self._waiting.serving():
            self._until(lambda: graph.closed.issuperset(mine))

    @property
    def is_idle(self) -> bool:
        """Whether no execution is in progress on the ranks of this process."""
        return not any(resident.in_flight for resident in self.residents.values())

    # -- executions -------------------------------------------------------------------------

    def execute(
        self, graph: Graph, variant: int, inputs: Sequence[Any], block: bool = True
    ) -> Future:
        """On the driver: start an execution.

        Args:
            graph: which.
            variant: for which signature.
            inputs: values for the parameters of the driver's program.
            block: whether to wait if the graph is at its capacity.

        Raises:
            InputError: the inputs do not fit; nothing was sent.
            CapacityError: the graph is at its capacity, and `block` is false.
            TransportError: a rank has ended.
        """
        driver = graph.driver
        graph.seats[driver][0].instances[variant].check_inputs(inputs)
        if not graph.free:
            self._make_room(graph, block)
        number = graph.started[driver]
        graph.started[driver] = number + 1
        index = graph.free.pop()
        future = graph.futures[index] = Future(self, number)
        self._records[driver].put(
            ((Kind.EXECUTE * GRAPHS + graph.number) * VARIANTS + variant) * SEATS + index
        )
        self.residents[driver].begin(graph.seats[driver][index], variant, inputs, number)
        if self._due:
            self._call_back()
        return future

    def turn(self) -> bool:
        """See `Progress`."""
        moved = False
        for rank in self._readers:
            while self._take(rank):
                moved = True
        residents = self.residents.values()
        for resident in residents if self._random is None else self._shuffled():
            if resident.in_flight and resident.turn():
                moved = True
        if self._due:
            self._call_back()
        return moved

    def wait(self, future: Future, timeout: float | None) -> None:
        """See `Progress`."""
        if not self._until(lambda: future.is_done, timeout):
            raise StepTimeout(self._lateness(future, timeout))

    def later(self, future: Future) -> None:
        """See `Progress`."""
        self._due.append(future)

    def watch(self, future: Future) -> Generator[Any, None, None]:
        """See `Progress`."""
        return self._waiting.watch(self.turn, future)

    # -- moving on --------------------------------------------------------------------------

    def _until(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Go on until `done`, or the time is up; which of the two."""
        deadline = None if timeout is None else monotonic() + timeout
        polls = 0
        left: float | None = None
        while not done():
            if self.turn():
                polls = 0
                continue
            if deadline is not None:
                left = deadline - monotonic()
                if left <= 0:
                    return False
            polls += 1
            self._waiting.pause(polls, left)
        return True

    def _make_room(self, graph: Graph, block: bool) -> None:
        self.turn()
        if graph.free:
            return
        if not block:
            raise CapacityError(
                f"{graph.in_flight} executions of '{graph.name}' are in flight, as many as it was "
                "compiled for: take a result first, or compile it with a larger max_inflight"
            )
        self._until(lambda: bool(graph.free))

    def _take(self, rank: int) -> bool:
        """Do what the next record asks of a rank; false if there is none, or its time is not come.

        What a record waits for are executions before it, so it is always the next to be done.
        """
        record = self._held.pop(rank, None)
        if record is None:
            number = self._readers[rank]()
            if not number:
                return False
            record = Record.unpack(number)
        graph = self.graphs[record.graph]
        if record.kind is Kind.CLOSE:
            if graph.is_idle(rank):
                self._release(graph, rank)
                return True
        else:
            seat = graph.seats[rank][record.seat]
            if not seat.busy:
                number = graph.started[rank]
                graph.started[rank] = number + 1
                self.residents[rank].begin(seat, record.variant, (), number)
                return True
        self._held[rank] = record
        return False

    def _release(self, graph: Graph, rank: int) -> None:
        graph.release(rank)
        if len(graph.closed) == len(graph.seats):
            del self.graphs[graph.number]

    def _shuffled(self) -> list[Resident]:
        assert self._random is not None
        residents = list(self.residents.values())
        return self._random.sample(residents, self._random.randint(1, len(residents)))

    def _call_back(self) -> None:
        while self._due:
            self._due.popleft().call_back()

    def _lateness(self, future: Future, timeout: float | None) -> str:
        where = []
        for resident in self.residents.values():
            for instance in resident.in_flight:
                record = FlightRecord(instance.module, [instance.position()])
                name = instance.module.name
                where.append(f"  @{name} {instance.execution}: {record.describe().strip()}")
        return "\n".join([f"execution {future.execution} has not ended after {timeout} s", *where])


class VirtualWaiting:
    """Where one process plays all ranks: if nothing moves, nothing ever will."""

    def pause(self, polls: int, seconds: float | None) -> None:
        """See `Waiting`.

        Raises:
            DeadlockError: nothing moves.
        """
        if polls > 1000:  # a shuffled turn may leave out those that could move
            raise DeadlockError("deadlock: no execution in flight can go on")

    def serving(self) -> AbstractContextManager[object]:
        """See `Waiting`."""
        return nullcontext()

    def watch(self, turn: Callable[[], bool], future: Future) -> Generator[Any, None, None]:
        """See `Waiting`."""
        while not future.is_done:
            turn()
            yield


def virtual_executions(size: int, shuffle: random.Random | None = None) -> Executions:
    """The executions of a virtual world."""
    return Executions(range(size), lambda driver: VirtualRecords(), VirtualWaiting(), shuffle)
