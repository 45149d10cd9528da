"""A machine of hosts and queues, which begins and ends the works of programs."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise

from cg.ir.attributes import Stream
from cg.ir.ops import (
    AllReduce,
    Barrier,
    Broadcast,
    Collective,
    Free,
    Gather,
    Recv,
    Return,
    Scatter,
    Send,
    View,
    Wait,
)

from .abstract_memory import Memory
from .abstract_programs import Message, Programs, Work

HOSTS_TRANSPORTS = (None, "cpu", "mpi")


class Hosts(enum.Enum):
    """What hosts wait for, ahead of an op that they put on a queue.

    AHEAD: nothing, as on a device. WAITING: a wait for a message keeps its host until that is over.
    BLOCKING: besides, all ops but communication are over when the host goes on, as on a CPU.
    STRICT: a wait for a message keeps its host, and any op that puts something on a device does
    until all messages are over that have been put there: the worst that a driver may do.
    ANNOUNCED: besides, messages of devices are announced by hosts, as in graphs that one rank
    drives.
    """

    AHEAD = enum.auto()
    WAITING = enum.auto()
    BLOCKING = enum.auto()
    STRICT = enum.auto()
    ANNOUNCED = enum.auto()


@dataclass(frozen=True, slots=True)
class Model:
    """A machine.

    Attributes:
        hosts: what hosts wait for.
        buffered: whether a send may be over before anybody receives it, and a member of a
            collective as soon as it has what it gets. If not, all ends of a message are over
            together.
        one_queue: whether all collectives of a rank share a queue, as those of a device may.
    """

    hosts: Hosts = Hosts.AHEAD
    buffered: bool = False
    one_queue: bool = False


_IDLE = (Free, View, Return)
"""The ops that put nothing on a device."""


class Phase(enum.IntEnum):
    """How far a work has come."""

    AHEAD = 0
    PUT = 1
    BEGUN = 2
    OVER = 3


class Machine:
    """Programs on a machine, at some point of a run.

    Attributes:
        phases: of each work.
        at: for each rank how many works its host has put on queues.
        beside: what was under way together with what `run` was to hold.
    """

    def __init__(self, programs: Programs, model: Model) -> None:
        self.programs = programs
        self.model = model
        self.works = programs.works
        self.lines = {rank: self._put_order(line) for rank, line in programs.lines.items()}
        self.phases = [Phase.AHEAD] * len(self.works)
        self.at = dict.fromkeys(self.lines, 0)
        self.beside: set[int] = set()
        self.queues = self._fill_queues()
        self.before = self._order()
        self.units = self._find_units()
        channels = programs.module.channels
        self.by_device = [
            work.message is not None and channels[work.message[0]].via not in HOSTS_TRANSPORTS
            for work in self.works
        ]

    def _put_order(self, line: Sequence[int]) -> list[int]:
        """The order in which a host puts the ops of its program on queues.

        A batch is one call of a library, which is made where the last op of it stands.
        """
        if self.model.hosts is Hosts.ANNOUNCED:
            line = self._deferred(line)
        last = {self.works[number].batch: number for number in line}
        found: list[int] = []
        for number in line:
            batch = self.works[number].batch
            if batch is None:
                found.append(number)
            elif last[batch] == number:
                found += [other for other in line if self.works[other].batch == batch]
        return found

    def _deferred(self, line: Sequence[int]) -> list[int]:
        """The order of a host that puts receives of devices on queues when they are announced."""
        channels = self.programs.module.channels
        found: list[int] = []
        waiting: list[int] = []
        for number in line:
            op = self.works[number].op
            if isinstance(op, Recv) and channels[op.chan].via not in HOSTS_TRANSPORTS:
                waiting.append(number)
                continue
            if isinstance(op, Wait):
                promised = self.programs.promised.get(op.operands[0])
                while promised in waiting:
                    found.append(waiting.pop(0))
            elif isinstance(op, Return) or op.stream is Stream.MESSAGE:
                found += waiting
                waiting.clear()
            found.append(number)
        return found

    def _queue_of(self, work: Work) -> Hashable:
        if self.model.one_queue and isinstance(work.op, Collective):
            return work.rank, Collective
        return work.queue

    def _fill_queues(self) -> list[list[int]]:
        queues: dict[Hashable, list[int]] = defaultdict(list)
        for line in self.lines.values():
            for number in line:
                queues[self._queue_of(self.works[number])].append(number)
        return list(queues.values())

    def _order(self) -> list[tuple[int, ...]]:
        """What has to be over before each work begins."""
        before = [set(work.needs) for work in self.works]
        for queue in self.queues:
            ahead: list[int] = []
            for last, number in pairwise([-1, *queue]):
                if last >= 0 and not self._are_together(last, number):
                    ahead = [last, *(n for n in ahead if self._are_together(n, last))]
                    ahead += [n for n in before[last] if self._are_together(n, last)]
                before[number].update(ahead)
        for line in self.lines.values():
            channels: dict[int, int] = {}
            for number in line:
                work = self.works[number]
                if work.message is not None:
                    chan = work.message[0]
                    if chan in channels:
                        before[number].add(channels[chan])
                    channels[chan] = number
                elif isinstance(work.op, Return):
                    before[number].update(n for n in line if n != number)
                if work.behind is not None:
                    before[number].add(work.behind)
        return [tuple(numbers) for numbers in before]

    def _are_together(self, one: int, other: int) -> bool:
        batch = self.works[one].batch
        return batch is not None and batch == self.works[other].batch

    def _find_units(self) -> dict[Message, tuple[int, ...]]:
        """For each message the works that are over together, where nothing is buffered."""
        units: dict[Message, tuple[int, ...]] = {}
        batches: dict[object, list[Message]] = defaultdict(list)
        for message, ends in self.programs.ends.items():
            op = self.works[next(iter(ends.values()))].op
            batch = op.batch if isinstance(op, Send | Recv) else None
            key = message if batch is None else (frozenset(ends), batch)
            batches[key].append(message)
        for together in batches.values():
            works = tuple(n for m in together for n in self.programs.ends[m].values())
            units.update(dict.fromkeys(together, works))
        return units

    # -- what can happen ------------------------------------------------------------------------

    def can_put(self, rank: int) -> bool:
        """Whether the host of a rank can put its next op on a queue."""
        line = self.lines[rank]
        return self.at[rank] < len(line) and self._passes(rank) and self._is_told(rank)

    def _passes(self, rank: int) -> bool:
        """Whether the host of a rank waits for nothing of its own rank."""
        hosts = self.model.hosts
        if hosts is Hosts.AHEAD:
            return True
        line, at = self.lines[rank], self.at[rank]
        op = self.works[line[at]].op
        if at and self._are_together(line[at - 1], line[at]):
            return True
        if isinstance(op, Wait):
            promised = self.programs.promised.get(op.operands[0])
            if promised is not None and self.phases[promised] is not Phase.OVER:
                return False
        if hosts is Hosts.WAITING or (hosts is not Hosts.BLOCKING and isinstance(op, _IDLE)):
            return True
        if hosts is Hosts.BLOCKING:
            last = line[at - 1] if at else line[at]
            return self.phases[last] in (Phase.AHEAD, Phase.OVER) or bool(self.works[last].message)
        return all(
            self.phases[number] is Phase.OVER for number in line[:at] if self.by_device[number]
        )

    def _is_told(self, rank: int) -> bool:
        """Whether the host of a rank knows that others have come, where that is announced."""
        number = self.lines[rank][self.at[rank]]
        work = self.works[number]
        if self.model.hosts is not Hosts.ANNOUNCED or not self.by_device[number]:
            return True
        assert work.message is not None, "only messages go by devices"
        ends = self.programs.ends[work.message]
        if isinstance(work.op, Send):
            return True
        return all(self._has_come(other, n) for other, n in ends.items() if other != rank)

    def _has_come(self, rank: int, number: int) -> bool:
        if self.phases[number] is not Phase.AHEAD:
            return True
        line, at = self.lines[rank], self.at[rank]
        is_send = isinstance(self.works[number].op, Send)
        return not is_send and line[at] == number and self._passes(rank)

    def can_begin(self, number: int) -> bool:
        """Whether a queue can begin a work."""
        phases = self.phases
        return phases[number] is Phase.PUT and all(
            n >= 0 and phases[n] is Phase.OVER for n in self.before[number]
        )

    def can_end(self, number: int) -> bool:
        """Whether a work that has begun can be over."""
        work, phases = self.works[number], self.phases
        if phases[number] is not Phase.BEGUN:
            return False
        if work.message is None:
            return True
        if not self.model.buffered:
            return all(phases[n] >= Phase.BEGUN for n in self.units[work.message])
        ends = self.programs.ends[work.message]
        others = [n for n in ends.values() if n != number]
        if isinstance(work.op, Send):
            return True
        if isinstance(work.op, Recv):
            return all(phases[n] is Phase.OVER for n in others)
        assert isinstance(work.op, Collective), "nothing else has a message"
        return all(
            phases[n] >= Phase.BEGUN for r, n in ends.items() if _waits_for(work.op, work.rank, r)
        )

    # -- one run --------------------------------------------------------------------------------

    def put(self, rank: int) -> None:
        """Let a host put its next op on a queue."""
        self.phases[self.lines[rank][self.at[rank]]] = Phase.PUT
        self.at[rank] += 1

    def run(self, held: int | None = None, memory: Memory | None = None) -> bool:
        """Let everything happen that can, but for the end of `held`; whether all ranks end.

        What needs `held` to be over does not happen, on other ranks as well.
        """
        phases = self.phases
        reached = [0] * len(self.queues)
        moved = True
        while moved:
            moved = False
            for rank in self.at:
                while self.can_put(rank):
                    self.put(rank)
                    moved = True
            for index, queue in enumerate(self.queues):
                at = reached[index]
                while at < len(queue) and phases[queue[at]] is not Phase.AHEAD:
                    number = queue[at]
                    if self.can_begin(number):
                        phases[number] = Phase.BEGUN
                        moved = True
                        if number == held:
                            self.beside.update(
                                n for n, phase in enumerate(phases) if phase is Phase.BEGUN
                            )
                        elif self.beside:
                            self.beside.add(number)
                        if memory is not None:
                            memory.begin(number)
                    if number != held and self.can_end(number) and not self._lacks(number, held):
                        phases[number] = Phase.OVER
                        moved = True
                        if memory is not None:
                            memory.end(number)
                    if phases[number] is not Phase.OVER and not (
                        at + 1 < len(queue) and self._are_together(number, queue[at + 1])
                    ):
                        break
                    at += 1
                while reached[index] < len(queue) and phases[queue[reached[index]]] is Phase.OVER:
                    reached[index] += 1
        return all(phase is Phase.OVER for phase in phases)

    def copy(self) -> Machine:
        """A machine of its own at the same point."""
        made = copy(self)
        made.phases, made.at = list(self.phases), dict(self.at)
        return made

    def key(self) -> Hashable:
        """Equal for machines at the same point."""
        return tuple(self.phases)

    def _lacks(self, number: int, held: int | None) -> bool:
        """Whether a work is a member of the collective of `held`, and lacks what that gives."""
        work = self.works[number]
        if held is None or work.message is None or self.works[held].message != work.message:
            return False
        if not self.model.buffered:
            return True
        rank = self.works[held].rank
        if isinstance(work.op, AllReduce) and work.op.donated:
            return False  # what has been read there may still be written
        return isinstance(work.op, Collective) and _waits_for(work.op, work.rank, rank)


def _waits_for(op: Collective, rank: int, other: int) -> bool:
    """Whether a member of a collective is not over before another one has begun."""
    if isinstance(op, Barrier):
        return True
    if isinstance(op, Broadcast | Scatter):
        return other == op.root
    return rank == op.root if isinstance(op, Gather) else True
