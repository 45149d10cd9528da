"""Compute which ops are done before an op of a scheduled program starts, on its rank and on others.

A *line* runs its ops one after the other; the lines of a rank run side by side. A stream is a line.
Of ops without a stream, communication has its channel as its line, and all others have the compute
stream. These rules order ops:

- An op follows the op before it on its line.
- A `wait` also follows the op that makes its operand. A `free` follows the ops that make its second
  and later operands.
- A receive also follows its send, and the `free` of its slot's last message.
- A member of a collective that gets something follows the members that give it.

A send follows no op of its receiver, as a transport may keep a message until it is asked for. The
order in which a program lists ops means nothing by itself.

A CPU has two more rules: it runs all ops except communication in the order of the program, and it
starts a communication only when it comes to it. Such a rank is called *blocking*.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ...ir.attributes import Stream
from ...ir.ops import Collective, Communication, Free, Op, Recv, Value, Wait, batch_of
from ...ir.ops.module import Module, Program
from ...ir.verify.message_matching import Message, match

Line: TypeAlias = int
"""A line: a channel by its number, or a stream by a negative number."""
_STREAMS: dict[Stream, Line] = {stream: -1 - i for i, stream in enumerate(Stream)}
HOST: Line = _STREAMS[Stream.COMPUTE]
Known: TypeAlias = Mapping[Line, int]
"""For each line the index of its latest op that is known to be done; so are all ops before it."""


def line_of(op: Op, blocking: bool) -> Line:
    """The line that an op runs on."""
    if isinstance(op, Communication):
        return (op.chan or 0) if op.stream is None else _STREAMS[op.stream]
    return HOST if blocking or op.stream is None else _STREAMS[op.stream]


_NOTHING: Known = {}


def awaited(op: Op) -> tuple[Value, ...]:
    """The operands that an op waits for, on whatever line they are made."""
    if isinstance(op, Wait):
        return op.operands
    return op.operands[1:] if isinstance(op, Free) else ()


@dataclass(slots=True)
class Clocks:
    """For each op of a program, the ops of the same rank that are known to be done when it starts.

    Attributes:
        lines: the line of each op.
        known: for each op, the ops of other lines that are done when it starts.
    """

    lines: list[Line] = field(default_factory=list)
    known: list[Known] = field(default_factory=list)
    _batches: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def of(program: Program, blocking: bool) -> Clocks:
        clocks = Clocks()
        lines, knowns = clocks.lines, clocks.known
        latest: dict[Line, int] = {}
        made_at: dict[Value, int] = {}
        for index, op in enumerate(program.ops):
            line = line_of(op, blocking)
            known = knowns[latest[line]] if line in latest else _NOTHING
            if isinstance(op, (Wait, Free)):
                for value in awaited(op):
                    if value in made_at:
                        known = clocks._joined(known, line, made_at[value])
            elif (  # started when the host comes to it
                (blocking or op.stream is None) and isinstance(op, Communication) and HOST in latest
            ):
                known = clocks._joined(known, line, latest[HOST])
            batch = batch_of(op)
            if batch is not None:
                clocks._batches[index] = batch
            lines.append(line)
            knowns.append(known)
            latest[line] = index
            for value in op.results:
                made_at[value] = index
        return clocks

    def is_done(self, earlier: int, later: int) -> bool:
        """True if an op is known to be done when a later op of the program starts."""
        line = self.lines[earlier]
        if line == self.lines[later]:
            return not self._are_together(earlier, later)
        return self.known[later].get(line, -1) >= earlier

    def _are_together(self, one: int, other: int) -> bool:
        """True if two ops are in one batch, so that neither follows the other."""
        batch = self._batches.get(one)
        return batch is not None and batch == self._batches.get(other)

    def _joined(self, known: Known, line: Line, earlier: int) -> Known:
        """The ops known to be done once `earlier` is; the same object if nothing is new."""
        earlier_line = self.lines[earlier]
        if earlier_line == line or known.get(earlier_line, -1) >= earlier:
            return known  # an op that is done brings all that was known when it started
        joined = {**known, earlier_line: earlier}
        for key, index in self.known[earlier].items():
            if key != line and joined.get(key, -1) < index:
                joined[key] = index
        return joined


Node: TypeAlias = tuple[int, int]
"""An op: its rank and its index."""


class HappensBefore:
    """The order of ops over all ranks, which is exact, and slower to ask than `Clocks`."""

    def __init__(self, module: Module, blocking: bool) -> None:
        self._blocking = blocking
        self._programs = {program.rank or 0: program for program in module.programs}
        self._messages = match(module)
        self._index: dict[Op, Node] = {}
        self._before: dict[Node, tuple[int, ...]] = {}
        self._host: dict[Node, tuple[int, ...]] = {}
        self._makers: dict[Value, Node] = {}
        self._frees: dict[Message, Node] = {}
        for rank, program in self._programs.items():
            self._read(rank, program)

    def is_done(self, rank: int, earlier: int, later: int) -> bool:
        """True if an op of a rank is known to be done when a later op of that rank starts.

        A communication starts when its own rank comes to it, wherever the other ranks are.
        """
        op = self._programs[rank].ops[later]
        comm = isinstance(op, Communication)
        target = (rank, earlier)
        seen = set(self._earlier((rank, later)) if comm else self._follows((rank, later)))
        pending = list(seen)
        while pending and target not in seen:
            for node in self._follows(pending.pop()):
                if node not in seen:
                    seen.add(node)
                    pending.append(node)
        return target in seen

    def _read(self, rank: int, program: Program) -> None:
        # The last op of each line, or the ops of a batch, which do not follow one another.
        latest: dict[Line, tuple[int, ...]] = {}
        origins: dict[Value, Message] = {}
        for index, op in enumerate(program.ops):
            node, line = (rank, index), line_of(op, self._blocking)
            self._index[op] = node
            last = latest.get(line, ())
            batch = batch_of(op)
            together = last and batch is not None and batch == batch_of(program.ops[last[0]])
            self._before[node] = self._before[rank, last[0]] if together else last
            if isinstance(op, Communication):
                origins[op.results[0]] = self._messages[op.chan or 0, op.seq or 0]
                # It is started when the host comes to it.
                if (self._blocking or op.stream is None) and HOST in latest:
                    self._host[node] = latest[HOST]
            elif isinstance(op, Wait | Free) and op.operands[0] in origins:
                message = origins[op.operands[0]]
                if isinstance(op, Free):
                    self._frees.setdefault(message, node)
                elif op.results:
                    origins[op.result] = message
            latest[line] = (*last, index) if together else (index,)
            self._makers.update(dict.fromkeys(op.results, node))

    def _follows(self, node: Node) -> Iterator[Node]:
        """The ops that an op directly follows."""
        rank, index = node
        op = self._programs[rank].ops[index]
        yield from self._earlier(node)
        if isinstance(op, Communication):
            yield from self._on_others(rank, op)
        for value in awaited(op):
            if value in self._makers:
                yield self._makers[value]

    def _on_others(self, rank: int, op: Communication) -> Iterator[Node]:
        """The ops of other ranks that an end of a message follows.

        A receive follows its send, and a member of a collective that gets a value follows the
        members that give it. A rank that only gives may be done before others take its value.
        """
        message = self._messages[op.chan or 0, op.seq or 0]
        if isinstance(op, Recv):
            yield from (self._index[end] for end in message.ends.values() if end is not op)
            if message.previous in self._frees:
                yield self._frees[message.previous]
        elif isinstance(op, Collective):
            exchange = op.exchange
            if exchange.senders and rank not in exchange.receivers:
                return
            for member in exchange.senders or exchange.members:
                if member == rank:
                    continue
                node = self._index[message.ends[member]]
                if op.shared_operand is None:
                    yield node
                else:  # the member may still write to the operand after the others have read it
                    yield from self._earlier(node)

    def _earlier(self, node: Node) -> Iterator[Node]:
        """The ops before an op on its line, and on the host."""
        rank, _ = node
        for table in (self._before, self._host):
            for index in table.get(node, ()):
                yield rank, index
