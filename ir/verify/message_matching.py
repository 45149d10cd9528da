"""Match the ends of messages between scheduled programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

from ..alike.alike_programs import AlikePrograms
from ..ops import Asynchronous, Collective, Communication, CopyStart, Recv, batch_of
from ..ops.module import Module
from ..text.diagnostics import IRError
from .channel_rules import unmatched, unmatched_alike


@dataclass(eq=False, slots=True)
class Message:
    """A send and its receive, the parts of a collective, or a copy of one rank.

    Attributes:
        chan, seq: the channel, and the number of the message on it; of a copy -1, and its number.
        ends: the op of each rank that takes part.
        unit: the messages that complete together: those of its batch, or itself alone.
        previous, following: the messages that use the slot before and after it.
        waiting: the ranks that are blocked in a wait for it.
        missing: the number of ends that have not been posted.
        done: whether it is complete.
        freed: whether the receiver has freed the slot.
        ready: the time at which the last end was posted; once done, the time of its completion.
        start: the time at which it began to travel, once done.
        wanted: the time at which a rank first came to a wait for it.
    """

    chan: int
    seq: int
    ends: dict[int, Asynchronous] = field(default_factory=dict)
    unit: tuple[Message, ...] = ()
    previous: Message | None = None
    following: Message | None = None
    waiting: list[int] = field(default_factory=list)
    missing: int = 0
    done: bool = False
    freed: bool = False
    ready: float = 0.0
    start: float = 0.0
    wanted: float = inf

    def __str__(self) -> str:
        op = next(iter(self.ends.values()))
        if isinstance(op, CopyStart):
            return f"copy {self.seq} {'to' if op.is_to_host else 'from'} the host"
        kind = op.opcode if isinstance(op, Collective) else "message"
        return f"{kind} {self.seq} of channel {self.chan}"


Messages: TypeAlias = dict[tuple[int, int], Message]
"""By channel or end, and number."""


def match(module: Module) -> Messages:
    """The messages of a scheduled module, by channel and number.

    Raises:
        IRError: a message lacks an end, or its ends do not agree.
    """
    problems = list(unmatched(module))
    if problems:
        raise IRError(*problems)
    messages: Messages = {}
    for program in module.programs:
        for op in program.ops:
            if isinstance(op, Communication):
                chan, seq = op.chan or 0, op.seq or 0
                message = messages.get((chan, seq))
                if message is None:
                    message = messages[chan, seq] = Message(chan, seq)
                message.ends[program.rank or 0] = op
                message.missing += 1
    _link_slots(messages)
    _link_batches(messages)
    return messages


def match_alike(module: Module, alike: AlikePrograms) -> Messages:
    """The messages of programs that stand for those of all ranks, by end and number.

    Each end has messages of its own, and those of a junction with one number complete together.
    The programs have no batches.

    Raises:
        IRError: a message lacks an end, or its ends do not agree.
    """
    problems = list(unmatched_alike(module, alike))
    if problems:
        raise IRError(*problems)
    numbers = {end: number for number, end in enumerate(alike.junctions)}
    messages: Messages = {}
    units: dict[tuple[int, int], list[Message]] = {}
    for program in alike.representatives:
        rank = program.rank or 0
        for op in program.ops:
            if isinstance(op, Communication):
                chan, seq = op.chan or 0, op.seq or 0
                message = Message(chan, seq, {rank: op}, missing=1)
                messages[numbers[rank, chan], seq] = message
                units.setdefault((alike.junctions[rank, chan], seq), []).append(message)
    for unit in units.values():
        for message in unit:
            message.unit = tuple(unit)
    _link_slots(messages)
    return messages


def _link_batches(messages: Messages) -> None:
    batches: dict[tuple[frozenset[int], int], list[Message]] = {}
    for message in messages.values():
        message.unit = (message,)
        batch = batch_of(next(iter(message.ends.values())))
        if batch is not None:
            batches.setdefault((frozenset(message.ends), batch), []).append(message)
    for unit in batches.values():
        for message in unit:
            message.unit = tuple(unit)


def _link_slots(messages: Messages) -> None:
    last: dict[tuple[int, int], Message] = {}
    for key in sorted(messages):
        message = messages[key]
        slots = [op.slot for op in message.ends.values() if isinstance(op, Recv)]
        for slot in slots:
            if slot is not None:
                previous = last.get((message.chan, slot))
                message.previous = previous
                if previous is not None:
                    previous.following = message
                last[message.chan, slot] = message
