"""Binds a rank's program for its device: ops go onto the streams that the program names.

The compute stream is torch's current one while the program runs, so calls are bound as on the
host. A `wait` for a value of another stream is a mark behind the op that made it, and a wait of the
stream for that mark. A message that goes by a stream has a mark behind it, for which `wait` lets
its own stream wait; the host goes on. What goes by the host's memory makes the host wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from torch import Tensor

from ....ir.attributes import Stream
from ....ir.ops import Call, Collective, Copy, Op, Recv, Send, Value, Wait, batch_of
from ....ir.types import FutureType, UnitType
from ...base import Port
from ...driven.ticket_locks import Tickets
from ...program.instruction_info import KEEP, InstructionInfo, Role
from ...program.instructions import Instruction
from ...program.linked import LinkedProgram
from ..base import Device, Queue
from ..ports import StreamPort, is_stream_port
from ..staging import StagedPort
from ..stream_order import Flow, Mark
from . import instructions
from .capture import Segment
from .host_staged import HostedBinder

_COMPUTE = Stream.COMPUTE


class DeviceBinder(HostedBinder):
    """Binds one program to a device's streams; see `Binder`.

    Args:
        device: of this rank.

    Attributes:
        flow: the program's streams, which run in stretches.
        segments: the parts of the program that are captured when it is bound, in order.
    """

    def __init__(
        self,
        linked: LinkedProgram,
        tickets: Tickets | None = None,
        *,
        device: Device,
    ) -> None:
        super().__init__(linked, tickets, device=device)
        self.flow = Flow(device)
        self.segments: tuple[Segment, ...] = ()
        self._made: dict[Value, Mark] = {}
        self._done: dict[Value, Mark] = {}
        self._slots: dict[Value, Mark] = {}
        self._freed: dict[tuple[int, int], Mark] = {}
        self._streamed: dict[Value, StreamPort] = {}
        self._batches: dict[int, Mark] = {}
        self._crossing = frozenset(
            op.operands[0]
            for op in linked.program.ops
            if isinstance(op, Wait) and not isinstance(op.operands[0].type, FutureType)
        )

    @property
    def messages(self) -> list[tuple[int, Mark]]:
        """The ops that go by streams, as indices of the program's, with the mark behind each."""
        made = {value: i for i, op in enumerate(self._program.ops) for value in op.results}
        return sorted(((made[f], mark) for f, mark in self._done.items()), key=itemgetter(0))

    @property
    def escaping(self) -> frozenset[int]:
        """The registers of values that methods or the caller get, or what shares their memory."""
        return frozenset(self._register(value) for value in self._layout.escaping)

    _lands_inputs = False  # whoever runs the program does it, ahead of what is captured

    def _bind_op(self, op: Op, arena: Tensor) -> None:
        stream = stream_of(op)
        if isinstance(op, Call | Copy) and stream is not Stream.COMPUTE:
            self._fail(
                op, f"`{op.opcode}` is on stream {stream.value}", "calls run on the compute stream"
            )
        super()._bind_op(op, arena)
        for value in op.results:
            if value in self._crossing:
                made = self._made[value] = Mark(self.flow)
                self._emit(instructions.mark(made, self.flow.use(stream)), KEEP)

    # -- communication ----------------------------------------------------------------------

    def _issue(self, op: Op, port: Port) -> None:
        if not is_stream_port(port):
            super()._issue(op, port)
            return
        sources = tuple(map(self._register, op.operands))
        self._emit(self._on_stream(op, port), InstructionInfo(Role.ISSUE, sources, port=port))

    def _on_stream(self, op: Op, port: StreamPort) -> Instruction:
        """What puts a communication op on its stream."""
        flow, queue = self.flow, self.flow.use(port.stream)
        future = op.result
        self._ports[future] = port
        self._indices[future] = self._at
        self._streamed[future] = port
        done = self._done[future] = self._mark_behind(op)
        freed = None
        if isinstance(op, Recv) and op.slot is not None:
            freed = self._freed.setdefault((op.chan, op.slot), Mark(flow))
            self._slots[future] = freed
        source = self._register(op.operands[0]) if op.operands else None
        return instructions.issue(
            port, self._code.registers, source, queue, done, Mark(flow), flow.compute, freed
        )

    def _mark_behind(self, op: Op) -> Mark:
        """The mark behind an op; those of a batch have one, which the last of them moves."""
        batch = batch_of(op)
        if batch is None:
            return Mark(self.flow)
        return self._batches.setdefault(batch, Mark(self.flow))

    def _bind_wait(self, op: Wait) -> None:
        source, queue = op.operands[0], self.flow.use(stream_of(op))
        port = self._streamed.get(source)
        if port is None:
            super()._bind_wait(op)
            self._follow_landing(source, op)
            made = self._made.get(source)  # none for what was there before the program began
            if made is not None:
                self._emit(instructions.follow(made, queue), KEEP)
            return
        done = self._done[source]
        is_first = self._layout.first_waits.get(source) is op
        if is_first and op.results and not isinstance(op.result.type, UnitType):
            target = self._register(op.result)
            run = instructions.arrive(port, self._code.registers, target, queue, done)
            self._emit(run, self._arriving(source, target))
        else:
            self._emit(instructions.follow(done, queue), KEEP)

    def _follow_landing(self, future: Value, op: Wait) -> None:
        """Let the stream of a wait go on behind a message's copy to the device."""
        port, stream = self._ports.get(future), stream_of(op)
        if isinstance(port, StagedPort) and port.landed is not None and stream is not _COMPUTE:
            self._emit(instructions.follow_event(port.landed, self.flow.use(stream)), KEEP)

    def _producers(self, op: Op) -> Sequence[Queue]:
        """An op of the host takes its operand from its own stream, as one on a device."""
        return (self.copies.compute, self.flow.use(stream_of(op)))

    def _arriving(self, future: Value, target: int) -> InstructionInfo:
        return InstructionInfo(Role.AWAIT, (), (target,))

    def awaited_outside(self, graph: int) -> list[Mark]:
        """The marks of messages that ops of a graph wait for and that were not issued in it."""
        ops = self._program.ops
        return [
            self._done[op.operands[0]]
            for op in ops
            if isinstance(op, Wait)
            and op.graph == graph
            and op.operands[0] in self._done
            and ops[self._indices[op.operands[0]]].graph != graph
        ]

    def _release(self, future: Value) -> None:
        freed = self._slots.get(future)
        if freed is not None:
            self._emit(instructions.mark(freed, self.flow.compute), KEEP)
        if future in self._streamed:
            self._ports.pop(future)
        else:
            super()._release(future)


def stream_of(op: Op) -> Stream:
    """The stream that an op is on; where the program does not say, the usual one of its kind."""
    if op.stream is not None:
        return op.stream
    if isinstance(op, Send):
        return Stream.SEND
    if isinstance(op, Recv):
        return Stream.RECV
    return Stream.COLLECTIVE if isinstance(op, Collective) else Stream.COMPUTE
