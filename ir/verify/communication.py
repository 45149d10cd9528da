"""Model the progress of scheduled programs: messages, waits, streams and slots.

The pass `check-deadlock` and the simulations use this model:

- A rank runs its program in order. Only a `wait` for a future blocks it, until the message is
  complete. (On a GPU the host does not block there; a program that completes under this model
  completes there too.)
- A message is complete once all its ends have been posted: a send and its receive, or the
  collective of every rank of a group. There is no buffering: a send alone completes nothing.
- A copy between a device and its host is a message with one end: it is complete once the copies
  before it on its stream are.
- Communication ops of one rank that share a stream complete in the order in which they were posted.
  The messages of a batch complete together, as soon as all of them can.
- A message with a slot is not complete before the receiver has freed the slot's last message.
- A rank that puts messages on a device may be blocked at any op until they are all complete: a call
  of the host may wait for the device, for instance to allocate memory, load a module or make a
  graph. Programs cannot know when. If asked to (`on_devices`), the model waits at each op.

Whether a message completes does not depend on the order in which ranks are visited. So one run to a
fixpoint decides, in time linear in the number of ops.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

from ..alike.alike_programs import AlikePrograms
from ..attributes import Stream
from ..ops import (
    Asynchronous,
    Collective,
    Communication,
    CopyStart,
    Free,
    Op,
    Recv,
    Return,
    Value,
    View,
    Wait,
    batch_of,
)
from ..ops.module import Module, Program
from ..ops.storage import SharedStorage
from .message_matching import Message, match, match_alike


class EventKind(enum.Enum):
    """The kind of an event of a rank's program.

    WAIT waits for the message of a `wait`. DEVICE waits for a message that is on the device when
    the host comes to an op, since the host may wait for the device there.
    """

    POST = enum.auto()
    WAIT = enum.auto()
    DEVICE = enum.auto()
    FREE = enum.auto()
    WORK = enum.auto()


Event: TypeAlias = tuple[EventKind, Message | None, Op]


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """The time in which an op runs."""

    rank: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Stall:
    """The time in which a wait for a message blocks its rank."""

    rank: int
    message: Message
    start: float
    end: float


class Progress:
    """The state of a run of all programs of a module.

    Attributes:
        programs: the program of each rank.
        messages: the messages by channel and number.
        copies: the copies of each rank between its device and its host, by rank and number.
        freed: the messages whose slots their receivers free at some point.
        events: the events of each rank, in program order.
        at: for each rank, the number of its events that have happened.
        clocks: for each rank, its time.
        spans: the spans of ops that take time, in program order for each rank.
        stalls: the times at which ranks were blocked, in program order for each rank.
    """

    def __init__(
        self,
        module: Module,
        cost: Callable[[Op], float] | None = None,
        transfer: Callable[[Message], float] | None = None,
        buffered: bool = False,
        one_queue: bool = False,
        on_devices: Set[int] = frozenset(),
        alike: AlikePrograms | None = None,
    ) -> None:
        """Prepare to run the programs of a scheduled module.

        Args:
            module: the scheduled module.
            cost: the time for which an op, other than a wait or a free, occupies its rank; None:
                ops take no time.
            transfer: the time for which a message travels and occupies its streams; None: none.
            buffered: whether a message with a slot, on a channel without a transport of its own,
                travels before its receive is posted. Programs that complete without this also
                complete with it.
            one_queue: whether collectives of all traffic wait for each other, as if on one stream.
            on_devices: the channels whose messages are on devices; hosts may wait for these at
                each op.
            alike: what stands for the programs of all ranks, and runs; None: all run.

        Raises:
            IRError: a message lacks an end, or its ends do not agree.
        """
        programs = module.programs if alike is None else alike.representatives
        self.programs = {program.rank or 0: program for program in programs}
        self.messages = match(module) if alike is None else match_alike(module, alike)
        self._message_of = {
            op: message for message in self.messages.values() for op in message.ends.values()
        }
        self.copies: dict[tuple[int, int], Message] = {}
        self.freed: set[Message] = set()
        self._on_devices = on_devices
        self.events = {
            rank: self._read(program, module, cost) for rank, program in self.programs.items()
        }
        self.at = dict.fromkeys(self.programs, 0)
        self.clocks = dict.fromkeys(self.programs, 0.0)
        self.spans: list[TimeSpan] = []
        self.stalls: list[Stall] = []
        self._cost = cost
        self._transfer = transfer
        self._one_queue = one_queue
        self._early = self._free_to_leave(module) if buffered else frozenset()
        self._free_at: dict[tuple[int, Stream], float] = {}
        self._queues: dict[tuple[int, Stream], deque[Message]] = {}

    def run(self) -> bool:
        """Run as far as possible; return whether all ranks finish and no message is in flight."""
        runnable = list(self.programs)
        while runnable:
            runnable += self._advance(runnable.pop())
        finished = all(self.at[rank] == len(events) for rank, events in self.events.items())
        return finished and all(message.done for message in self.messages.values())

    def blocked(self, rank: int) -> Event | None:
        """The event that a rank is blocked at; None if it has come to its end."""
        events = self.events[rank]
        return events[self.at[rank]] if self.at[rank] < len(events) else None

    def head(self, rank: int, stream: Stream) -> Message | None:
        """The first message on a rank's stream, which the others there wait for."""
        queue = self._queues.get((rank, stream))
        return queue[0] if queue else None

    def posted(self, message: Message, rank: int) -> bool:
        """True if a rank has posted its end of a message."""
        op = message.ends[rank]
        return any(event[2] is op for event in self.events[rank][: self.at[rank]])

    def _free_to_leave(self, module: Module) -> frozenset[Communication]:
        """The receives that their messages need not wait for."""
        early: list[Communication] = []
        for message in self.messages.values():
            if module.channels[message.chan].via is None:
                held = [
                    op
                    for op in message.ends.values()
                    if isinstance(op, Recv) and op.slot is not None
                ]
                message.missing -= len(held)
                early += held
        return frozenset(early)

    def _read(
        self, program: Program, module: Module, cost: Callable[[Op], float] | None
    ) -> list[Event]:
        """The events of a program: the ops that communicate, and those that take time."""
        promised: dict[Value, Message] = {}
        group_of = SharedStorage(program, module.functions).of
        received: dict[Value, list[Message]] = {}
        # The last free of each group of values, which gives its storage back, and earlier frees.
        last: dict[Value, Free] = {}
        early: set[Op] = set()
        events: list[Event] = []
        on_device: dict[Message, None] = {}
        for op in program.ops:
            if on_device:
                events += self._of_device(on_device, program.rank or 0, op)
            if isinstance(op, Wait):
                message = promised.get(op.operands[0])
                if message is not None:
                    events.append((EventKind.WAIT, message, op))
            elif isinstance(op, Communication):
                message = self._message_of[op]
                promised[op.results[0]] = message
                received.setdefault(group_of(op.results[0]), []).append(message)
                events.append((EventKind.POST, message, op))
                if message.chan in self._on_devices:
                    on_device[message] = None
            elif isinstance(op, CopyStart):
                message = promised[op.result] = self._copy(program.rank or 0, op)
                events.append((EventKind.POST, message, op))
            elif isinstance(op, Free):
                group = group_of(op.operands[0])
                if group not in received:
                    continue
                if group in last:
                    early.add(last[group])
                last[group] = op
                for message in received[group]:
                    self.freed.add(message)
                    events.append((EventKind.FREE, message, op))
            elif cost is not None:
                events.append((EventKind.WORK, None, op))
        return [event for event in events if event[2] not in early] if early else events

    def _copy(self, rank: int, op: CopyStart) -> Message:
        number = len(self.copies)
        copy = self.copies[rank, number] = Message(-1, number, {rank: op}, missing=1)
        copy.unit = (copy,)
        return copy

    def _of_device(self, on_device: dict[Message, None], rank: int, op: Op) -> list[Event]:
        """The waits of a host for its device at an op; their messages are removed from `on_device`.

        The messages of a batch complete together. So the host waits for none of them before it has
        posted all of its ends in the batch.
        """
        if isinstance(op, Free | View | Return):
            return []  # these ops put nothing on the device
        whole = [
            message
            for message in on_device
            if batch_of(message.ends[rank]) is None
            or all(part in on_device for part in message.unit if rank in part.ends)
        ]
        for message in whole:
            del on_device[message]
        return [(EventKind.DEVICE, message, op) for message in whole]

    def _advance(self, rank: int) -> list[int]:
        """Run a rank until it blocks; return the ranks that it has unblocked."""
        events, at = self.events[rank], self.at[rank]
        freed: list[int] = []
        while at < len(events):
            kind, message, op = events[at]
            if message is None:
                self._work(rank, op)
            elif kind is EventKind.POST:
                self._work(rank, op)
                freed += self._post(rank, message)
            elif kind is EventKind.FREE:
                freed += self._free(rank, message)
            elif self._arrive(message, rank):
                if message.ready > self.clocks[rank]:
                    self.stalls.append(Stall(rank, message, self.clocks[rank], message.ready))
                    self.clocks[rank] = message.ready
            else:
                message.waiting.append(rank)
                break
            at += 1
        self.at[rank] = at
        return freed

    def _arrive(self, message: Message, rank: int) -> bool:
        """Say that a rank has come to a wait for a message; return whether it can go on."""
        if self.clocks[rank] < message.wanted:
            message.wanted = self.clocks[rank]
        return message.done

    def _work(self, rank: int, op: Op) -> None:
        duration = self._cost(op) if self._cost is not None else 0.0
        if duration:
            start = self.clocks[rank]
            self.clocks[rank] = start + duration
            self.spans.append(TimeSpan(rank, op, start, start + duration))

    def _post(self, rank: int, message: Message) -> list[int]:
        op = message.ends[rank]
        if op in self._early:
            return []
        message.missing -= 1
        message.ready = max(message.ready, self.clocks[rank])
        if (stream := self.stream_of(op)) is not None:
            self._queues.setdefault((rank, stream), deque()).append(message)
        return self._complete(message)

    def _free(self, rank: int, message: Message) -> list[int]:
        message.freed = True
        following = message.following
        if following is None:
            return []
        following.ready = max(following.ready, self.clocks[rank])
        return self._complete(following)

    def _complete(self, first: Message) -> list[int]:
        """Complete a message if possible, then those behind it; return the ranks that waited."""
        woken: list[int] = []
        candidates = [first]
        while candidates:
            message = candidates.pop()
            if message.done or not all(map(self._can_complete, message.unit)):
                continue
            streams = [stream for part in message.unit for stream in self._streams(part)]
            self._travel(message.unit, streams)
            for part in message.unit:
                woken += part.waiting
                part.waiting.clear()
            for stream in streams:
                self._queues[stream].popleft()
            candidates += [self._queues[stream][0] for stream in streams if self._queues[stream]]
        return woken

    def _streams(self, message: Message) -> list[tuple[int, Stream]]:
        """The streams that a message is on."""
        streams = (
            (rank, self.stream_of(op)) for rank, op in message.ends.items() if op not in self._early
        )
        return [(rank, stream) for rank, stream in streams if stream is not None]

    def stream_of(self, op: Asynchronous) -> Stream | None:
        """The stream on which an op waits for earlier ops."""
        if self._one_queue and op.stream is not None and isinstance(op, Collective):
            return Stream.COLLECTIVE
        return op.stream

    def _travel(self, unit: Sequence[Message], streams: Sequence[tuple[int, Stream]]) -> None:
        """Complete messages together, at the time that their ends and streams allow."""
        busy = (self._free_at.get(stream, 0.0) for stream in streams)
        start = max(*(message.ready for message in unit), *busy, 0.0)
        end = start
        if self._transfer is not None:
            end += max(map(self._transfer, unit))
        for message in unit:
            message.start, message.ready, message.done = start, end, True
        self._free_at.update(dict.fromkeys(streams, end))

    def _can_complete(self, message: Message) -> bool:
        """True if a message waits for nothing, except perhaps for others of its unit."""
        if message.missing or (message.previous is not None and not message.previous.freed):
            return False
        return all(self._queues[stream][0] in message.unit for stream in self._streams(message))
