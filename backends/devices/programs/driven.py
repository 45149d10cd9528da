"""Bind a program of a driven graph: tensors go by streams, and hosts announce them.

A device does not look into messages, so an error cannot travel in one. The sender's host therefore
announces each message to the receiver's host: that the message is on a stream, or the error in its
place. The receive is put on a stream when the announcement has come, and not at all if that is an
error. So no stream ever waits for a message that nobody sends, and nothing has to be broken off.
Members of a collective tell each other that they have come to it, and then put it on their streams.

Receives go onto their stream in the order of the program: an op that waits for one first puts those
ahead of it there, and so does a send on the same stream. Of several executions in flight, one puts
all its work on the rank's streams before the next does. So the work that two ranks put on the
streams between them has one order on both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ....ir.attributes import Stream
from ....ir.ops import (
    Assemble,
    Barrier,
    Call,
    Collective,
    Constant,
    Copy,
    Op,
    Recv,
    Reserve,
    Send,
    Slice,
    Value,
    View,
    Wait,
    batch_of,
)
from ....ir.ops.module import Channel
from ....ir.types import UnitType
from ...base import Communicator, Port
from ...device import Device
from ...program import instructions as host
from ...program.code import Code
from ...program.instruction_info import KEEP, InstructionInfo, Role
from ...program.instructions import Instruction
from ...program.linked import LinkedProgram
from ...program.ticket_locks import STREAMS, Tickets
from ..ports import StreamPort
from ..stream_order import StreamEvent
from . import instructions
from .binder import DeviceBinder, stream_of
from .tail import follow_tails


@dataclass(frozen=True, slots=True)
class HostHandshake:
    """The channel by which hosts announce the messages of another channel, which go by streams.

    Attributes:
        communicator: of hosts.
        channel: of hosts, between the ranks of the announced channel.
    """

    communicator: Communicator
    channel: Channel

    def port(self, op: Send | Recv | Collective) -> Port:
        """The port by which a rank announces an op, or hears of it."""
        id_, unit = self.channel.id, UnitType()
        if isinstance(op, Send):
            return self.communicator.send_port(Send(chan=id_, peer=op.peer), self.channel, unit)
        if isinstance(op, Recv):
            return self.communicator.recv_port(Recv(chan=id_, peer=op.peer), self.channel, unit)
        barrier = Barrier(chan=id_, group=op.group)
        return self.communicator.collective_port(barrier, self.channel, None, unit)


class DrivenBinder(DeviceBinder):
    """Binds one program; see `Binder`.

    Args:
        handshakes: by the id of each channel whose messages go by streams.

    Attributes:
        acquires: the instructions that wait for earlier executions.
    """

    def __init__(
        self,
        linked: LinkedProgram,
        tickets: Tickets,
        *,
        device: Device,
        handshakes: Mapping[int, HostHandshake],
    ) -> None:
        super().__init__(linked, tickets, device=device)
        self._handshakes = handshakes
        self._expected: dict[Value, tuple[Recv, StreamPort, Port]] = {}
        self._tokens: dict[Value, int] = {}
        self._told: list[Port] = []
        self.acquires: frozenset[Instruction] = frozenset()
        ops = linked.program.ops
        work = [index for index, op in enumerate(ops) if isinstance(op, _WORK)]
        self._first_work = next((i for i in work if not isinstance(ops[i], Recv)), 0)
        self._last_work = max(work, default=-1)
        params = frozenset(linked.program.params)
        streams = {stream_of(op): None for op in ops if not params.isdisjoint(op.operands)}
        self._landed = StreamEvent(self.order)
        self._takers = [
            self.order.use(stream) for stream in streams if stream is not Stream.COMPUTE
        ]

    def bind(self) -> Code:
        """Bind the program; other streams wait for the compute stream, which lands the inputs."""
        code = super().bind()
        events = [instructions.record(self._landed, self.order.compute)] if self._takers else []
        code.put_first([*self._land_inputs(code), *events])
        return code

    def _make_locks(self) -> tuple[dict[int, list[Instruction]], dict[int, list[Instruction]]]:
        acquires, releases = super()._make_locks()
        uses = {op.chan for op in self._program.ops if isinstance(op, Send | Recv | Collective)}
        if not uses.isdisjoint(self._handshakes):
            assert self._tickets is not None, "several executions may be in flight"
            acquire, release = self._tickets.acquire_and_release(STREAMS)
            follows = [instructions.follow(self._landed, queue) for queue in self._takers]
            acquires.setdefault(self._first_work, []).extend([acquire, *follows])
            releases.setdefault(self._last_work, []).append(release)
        for op_acquires in acquires.values():
            op_acquires.append(self._catch_up)
        self.acquires = frozenset(
            acquire for op_acquires in acquires.values() for acquire in op_acquires
        )
        return acquires, releases

    def _catch_up(self) -> bool:
        """Wait for the tails of earlier executions.

        Tails may have touched the same actors, and may receive where this execution does.
        """
        follow_tails(self.device, self.order.queues)
        return True

    def _bind_op(self, op: Op, arena: object) -> None:
        super()._bind_op(op, arena)  # type: ignore[arg-type]
        if self._at == self._last_work:
            self._receive(None)

    # -- communication ----------------------------------------------------------------------

    def _issue(self, op: Op, port: Port) -> None:
        if not isinstance(port, StreamPort):
            super()._issue(op, port)
            return
        assert isinstance(op, Send | Recv | Collective), "nothing else has a port"
        assert op.chan is not None, "a program's messages have channels"
        if op.graph is not None:
            self._fail(
                op,
                f"`{op.opcode}` is in a graph, and other messages of the step are not",
                "in a graph that one rank drives, all are or none is",
            )
        sources = tuple(map(self._register, op.operands))
        handshake = self._handshakes[op.chan].port(op)
        tell = host.issue(handshake, self._code.registers, None)
        if isinstance(op, Recv):
            self._indices[op.result] = self._at
            self._expected[op.result] = op, port, handshake
            self._emit(tell, InstructionInfo(Role.ISSUE, port=handshake))
            return
        if batch_of(op) is not None:
            self._fail(
                op,
                f"`{op.opcode}` is in a batch of a graph that one rank drives",
                "an error may take its place; compile with batch-messages{batches=false}",
            )
        if port.stream is Stream.MESSAGE:
            self._receive(None)
        token = self._tokens[op.result] = self._token()
        if isinstance(op, Send):
            self._emit(self._on_stream(op, port), InstructionInfo(Role.COMPUTE, sources, (token,)))
            self._emit(tell, InstructionInfo(Role.ISSUE, (token,), port=handshake))
            self._told.append(handshake)
            return
        self._emit(tell, InstructionInfo(Role.ISSUE, sources, port=handshake))
        self._emit(_told(handshake), InstructionInfo(Role.AWAIT, (), (token,), handshake), self._at)
        self._emit(
            self._on_stream(op, port), InstructionInfo(Role.COMPUTE, (*sources, token), (token,))
        )

    def _bind_wait(self, op: Wait) -> None:
        if op.operands[0] in self._expected:
            self._receive(op.operands[0])
        super()._bind_wait(op)

    def _arriving(self, future: Value, target: int) -> InstructionInfo:
        return InstructionInfo(Role.COMPUTE, (self._tokens[future],), (target,))

    def _receive(self, last: Value | None) -> None:
        """Await the handshakes of receives up to `last`, or of all, and put them on streams."""
        while self._expected:
            future = next(iter(self._expected))
            op, port, handshake = self._expected.pop(future)
            posted = self._indices[future]
            token = self._tokens[future] = self._token()
            self._emit(
                _told(handshake), InstructionInfo(Role.AWAIT, (), (token,), handshake), posted
            )
            sources = (token, *map(self._register, op.operands))
            self._emit(self._on_stream(op, port), InstructionInfo(Role.COMPUTE, sources, (token,)))
            if future is last:
                return

    def _finish(self) -> None:
        """Let the compute stream wait for all messages: then their operands may be written to."""
        awaited = {
            op.operands[0]
            for op in self._program.ops
            if isinstance(op, Wait) and stream_of(op) is Stream.COMPUTE
        }
        for future, done in self._done.items():
            if future not in awaited:
                self._emit(instructions.follow(done, self.order.compute), KEEP)
        super()._finish()
        for handshake in self._told:
            self._emit(handshake.poll, KEEP)

    def _token(self) -> int:
        """A register for the error in place of a message, if there is one."""
        self._code.registers.append(None)
        self._code.template.append(None)
        return len(self._code.template) - 1


_WORK = (Call, Constant, Copy, View, Slice, Reserve, Assemble, Wait, Send, Recv, Collective)
"""The ops that put work on streams, or may read values there."""


def _told(handshake: Port) -> Instruction:
    """Wait for an announcement."""
    poll, take, release = handshake.poll, handshake.take, handshake.release

    def run() -> bool:
        if not poll():
            return False
        take()
        release()
        return True

    return run
