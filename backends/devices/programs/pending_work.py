"""Describe the work of an execution that a device has not ended: messages by stream, and graphs.

The host has put all work on streams by then. Only events tell how far the device is: one behind
each message outside of graphs, and one behind each graph if there are several. They belong to the
execution that was put on the device last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from ....ir.ops import Collective, CopyStart, Op, Recv, Send
from ....ir.ops.module import Module, Program
from ....ir.text.printer import format_op
from ....ir.types import format_ranks
from ...agreement.plan_hash import plan_hash
from ...base import Body
from ...failures.device_faults import suspects
from ...failures.flight import Position
from ..stream_order import StreamEvent
from .binder import stream_of
from .capture import CapturedSegment

MOST = 8
"""The most messages of a graph that are named; others are counted."""


class PendingWork:
    """The work that a bound program puts on its device. Any thread may call it.

    Args:
        program: of this rank.
        module: the module that it is part of.
        messages: the ops whose messages go by streams: the index of each, and the event behind it.
        segments: the parts that are captured.
        position: returns where the host is.
        bodies: the Python of functions, by name.
    """

    def __init__(
        self,
        program: Program,
        module: Module,
        messages: Sequence[tuple[int, StreamEvent]],
        segments: Sequence[CapturedSegment],
        position: Callable[[], Position],
        bodies: Mapping[str, Body] | None = None,
    ) -> None:
        self._program = program
        self._module = module
        self._messages = messages
        self._segments = segments
        self._position = position
        self._bodies = bodies or {}

    @cached_property
    def name(self) -> str:
        """The step and its plan, in words."""
        return named(self._module)

    @property
    def running(self) -> int | None:
        """The number of the execution that the host is in; None if it is in none."""
        at = self._position()
        return at.execution if at.running else None

    def suspects(self, begun: bool) -> list[str]:
        """Describe the methods that may have stopped the device by an index, in their order.

        Args:
            begun: True to count only those that the host has begun in the current execution. If the
                host is at a graph, all of the graph counts.
        """
        ops, at = self._program.ops, self._position()
        end = len(ops)
        if begun and at.running:
            end, graph = at.op + 1, ops[at.op].graph
            while graph is not None and end < len(ops) and ops[end].graph == graph:
                end += 1
        return suspects(ops[:end], self._module, self._bodies)

    def unfinished(self, execution: int) -> str:
        """The parts of an execution that the device has not ended, a line each."""
        last = self._position().execution
        if last != execution:
            return (
                f"  a part of it that is not known, since the host has put what is of execution "
                f"{last} behind it"
            )
        try:
            lines = [*self._streams(), *self._graphs()]
        except RuntimeError as error:
            return f"  a part of it that is not known, since the device has failed: {error}"
        return "\n".join(lines or [f"  {self._nothing_known()}"])

    def _streams(self) -> list[str]:
        """The message that each stream is at; messages behind it have not begun."""
        pending: dict[str, list[Op]] = {}
        for index, event in self._messages:
            if event.is_outside and not event.has_passed():
                op = self._program.ops[index]
                pending.setdefault(stream_of(op).value, []).append(op)
        return [
            f"  stream {stream}: {_described(ops[0])}{_behind(len(ops) - 1)}"
            for stream, ops in pending.items()
        ]

    def _graphs(self) -> list[str]:
        """The first graph that may not have ended; those behind it have not begun."""
        replayed = [segment for segment in self._segments if segment.is_replayed]
        pending = [
            segment
            for segment in replayed
            if segment.behind is None or not segment.behind.has_passed()
        ]
        if not pending:
            return []
        segment = pending[0]
        ops = self._program.ops
        inside = [ops[index] for index, _ in self._messages if ops[index].graph == segment.number]
        messages = [_message(op) for op in inside[:MOST]]
        if len(inside) > MOST:
            messages.append(f"{len(inside) - MOST} more")
        first = next(op for op in ops if op.graph == segment.number)
        head = f"  graph {segment.number}, which begins with {_quoted(first)}"
        later_graphs = [str(segment.number) for segment in pending[1:]]
        tail = f"; behind it: graphs {', '.join(later_graphs)}" if later_graphs else ""
        place = "at a kernel of a method"
        if messages:
            place = f"at one of its messages ({'; '.join(messages)}), or {place}"
        return [f"{head}: {place}{tail}"]

    def _nothing_known(self) -> str:
        if self._messages:
            return "its messages have ended, so it is at a kernel of a method"
        return "it has no messages between devices, so it is at a kernel of a method"


def named(module: Module) -> str:
    """A step and the hash of its plan, in words; the hash as ranks compare it."""
    return f"step '{module.name}' (plan {plan_hash(module)[:16]})"


def _behind(count: int) -> str:
    return f", and {count} more behind it" if count else ""


def _described(op: Op) -> str:
    return f"{_quoted(op)}, {_message(op)}"


def _quoted(op: Op) -> str:
    location = f" ({op.loc})" if op.loc is not None else ""
    return f"`{format_op(op)}`{location}"


def _message(op: Op) -> str:
    """The name of a message, which is the same on the other ranks."""
    if isinstance(op, Collective):
        ranks = format_ranks(op.group.ranks)
        return f"{op.opcode} {op.seq} of channel {op.chan} among ranks {ranks}"
    if isinstance(op, CopyStart):
        return f"the copy of %{op.operands[0].name} {'to' if op.is_to_host else 'from'} the host"
    assert isinstance(op, Send | Recv), "nothing else goes by a stream"
    way = f"to rank {op.peer}" if isinstance(op, Send) else f"from rank {op.peer}"
    return f"message {op.seq} of channel {op.chan} {way}"
