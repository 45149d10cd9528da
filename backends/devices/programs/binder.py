"""Bind a rank's program to its device: ops go onto the streams that the program names.

The compute stream is torch's current one while the program runs, so calls are bound as on the
host. A `wait` for a value of another stream is an event behind the op that made the value, and a
wait of the stream for that event. A message that goes by a stream has an event behind it: `wait`
lets its own stream wait for the event, and the host goes on. The host itself waits for a message
that goes by its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ....ir.attributes import Stream
from ....ir.ops import (
    Assemble,
    Call,
    Collective,
    Copy,
    CopyStart,
    Free,
    Op,
    Recv,
    Reserve,
    Return,
    RowCollective,
    Send,
    Slice,
    Value,
    Wait,
    batch_of,
)
from ....ir.ops.host_state import reads_at_end
from ....ir.ops.module import Function, FunctionKind
from ....ir.types import FutureType, TensorType, UnitType, is_on_host
from ...base import Body, Port, StatefulBody
from ...device import Device, DeviceQueue, Event
from ...program import instructions as host
from ...program.binder import Binder
from ...program.code import Code
from ...program.instruction_info import KEEP, InstructionInfo, Role
from ...program.instructions import Instruction
from ...program.linked import LinkedProgram
from ...program.random import seeded_on
from ...program.ticket_locks import Tickets
from ...program.type_checks import checked
from ...program.value_copies import HostCopy
from ..pinned_copies import FetchPort, OffloadPort, PinnedBuffers, SettlingPort
from ..ports import ReceivingPort, StreamPort
from ..staging import Copies, StagedPort
from ..stream_order import StreamEvent, StreamOrder
from . import instructions
from .capture import CapturedSegment


class DeviceBinder(Binder):
    """Binds one program to a device's streams; see `Binder`.

    Args:
        device: of this rank.

    Attributes:
        linked: the program, and what it runs with; its constants are on the device.
        copies: between the device and its host, for messages that go by the host.
        order: the streams of the program.
        segments: the parts of the program that are captured when it is bound, in order.
        has_host_sends: whether the program sends by a transport of hosts.
    """

    def __init__(
        self, linked: LinkedProgram, tickets: Tickets | None = None, *, device: Device
    ) -> None:
        constants = {name: landed(value, device) for name, value in linked.constants.items()}
        self.linked = linked = replace(linked, constants=constants)
        super().__init__(linked, tickets, target=device.torch_device)
        self.device = device
        self.copies = Copies(device)
        self._pinned = PinnedBuffers(device)
        self._code.progress.append(self.copies.move_on)
        self.order = StreamOrder(device)
        self.segments: tuple[CapturedSegment, ...] = ()
        self.has_host_sends = False
        self._events: dict[Value, StreamEvent] = {}
        self._done: dict[Value, StreamEvent] = {}
        self._slots: dict[Value, StreamEvent] = {}
        self._freed: dict[tuple[int, int], StreamEvent] = {}
        self._streamed: dict[Value, StreamPort] = {}
        self._batches: dict[int, StreamEvent] = {}
        # The future that each wait on another stream than the compute stream waits for, by result.
        self._elsewhere = {
            op.result: op.operands[0]
            for op in linked.program.ops
            if isinstance(op, Wait) and op.results and stream_of(op) is not Stream.COMPUTE
        }
        self._crossing = frozenset(
            op.operands[0]
            for op in linked.program.ops
            if isinstance(op, Wait) and not isinstance(op.operands[0].type, FutureType)
        )

    @property
    def messages(self) -> list[tuple[int, StreamEvent]]:
        """The ops whose messages go by streams: the index of each, and the event behind it."""
        indices = {value: i for i, op in enumerate(self._program.ops) for value in op.results}
        return sorted(((indices[f], event) for f, event in self._done.items()), key=itemgetter(0))

    @property
    def escaping(self) -> frozenset[int]:
        """The registers of what methods or the caller get, and of values that share its memory."""
        return frozenset(self._register(value) for value in self._layout.escaping)

    def order_of(self, graph: int | None) -> StreamOrder:
        """The streams for the ops of a graph, by its number; None means ops outside of graphs."""
        return self.order

    def _land_inputs(self, code: Code) -> list[Instruction]:
        """Instructions that bring the inputs to the device, ahead of segments."""
        land = partial(landed, device=self.device)
        return [
            host.apply(code.registers, register, register, land)
            for register, value in enumerate(self._program.params)
            if isinstance(value.type, TensorType)
        ]

    def _adapted(self, body: Body, function: Function) -> Body:
        """Let an opaque method make tensors on the device, and move those that it returns there."""
        if function.kind is FunctionKind.HOST:
            return _handing_over(body, function)
        if function.kind is not FunctionKind.OPAQUE:
            return body
        return checked(_on_device(body, function, self.device), function)

    def _seeded(self, body: Body, key: int) -> Body:
        return seeded_on(self.device, super()._seeded(body, key), self._seed, key, self._execution)

    def _bind_call(self, op: Call) -> None:
        if self._module.functions[op.fn.name].kind is FunctionKind.OPAQUE:
            self._emit(self.copies.move_on, KEEP)  # nothing looks after messages while it runs
        super()._bind_call(op)

    def _bind_op(self, op: Op, arena: Tensor) -> None:
        stream = stream_of(op)
        computes = isinstance(op, Call | Copy | Slice | Reserve | Assemble)
        if computes and stream is not Stream.COMPUTE:
            self._fail(
                op, f"`{op.opcode}` is on stream {stream.value}", "calls run on the compute stream"
            )
        super()._bind_op(op, arena)
        for value in op.results:
            if value in self._crossing:
                event = self._events[value] = StreamEvent(self.order)
                self._emit(instructions.record(event, self.order.use(stream)), KEEP)

    # -- communication ----------------------------------------------------------------------

    def _issue(self, op: Op, port: Port) -> None:
        if isinstance(op, RowCollective):
            self._fail(
                op,
                "the host would have to wait for the ids that say which rows of a device travel",
                "cut experts with dispatch='gather' where ranks have devices",
            )
        if isinstance(port, StreamPort):
            sources = tuple(map(self._register, op.operands))
            self._emit(self._on_stream(op, port), InstructionInfo(Role.ISSUE, sources, port=port))
            return
        operand = _carried(op.operands[0]) if op.operands else None
        result = _carried(op.result)
        sends = operand if isinstance(operand, TensorType) else None
        receives = result if isinstance(result, TensorType) else None
        if (sends or receives) is not None and isinstance(op, Recv) and op.operands:
            self._fail(op, "a transport of the host cannot receive into a device's buffer")
        if sends is None and not isinstance(op, Recv):
            # This message would overtake those that are still being copied.
            self._emit(self.copies.move_on, KEEP, self._at)
        self.has_host_sends |= not isinstance(op, Recv)
        if sends is not None or receives is not None:
            port = self._staged(op, port, sends, receives)
        super()._issue(op, port)

    def _staged(
        self, op: Op, port: Port, sends: TensorType | None, receives: TensorType | None
    ) -> StagedPort:
        assert isinstance(op, Send | Recv | Collective), "nothing else has a port"
        assert op.chan is not None, "a program's messages have channels"
        slot = op.slot if isinstance(op, Recv) else None
        landing = None if receives is None else self.copies.landing(op.chan, slot, receives)
        changes = sends is not None and self._may_change(op.operands[0])
        # As for an op on the device, the operand may come from the op's own stream.
        producers = (self.copies.compute, self.order.use(stream_of(op)))
        return StagedPort(port, self.copies, sends, landing, producers, changes)

    def _bind_copy_start(self, op: CopyStart) -> None:
        device, queue = self.device, self.order.use(stream_of(op))
        if op.memory is not None:
            self._issue(op, SettlingPort(device, queue))
        elif op.is_to_host:
            self._issue(op, OffloadPort(device, queue, self._pinned.of(op)))
        else:
            self._issue(op, FetchPort(device, queue))

    def _bind_return(self, op: Return) -> None:
        """Let the host wait for copies of parameters that rest there, ahead of the end.

        Python of the user may write to the parameters as soon as the execution has ended.
        """
        if reads_at_end(self._program, self._module.functions):
            behind = self.device.event()
            self._emit(partial(_recorded, behind, self.order.compute), KEEP)
            self._emit(behind.query, KEEP)
        super()._bind_return(op)

    def _on_stream(self, op: Op, port: StreamPort) -> Instruction:
        """The instruction that puts a communication op on its stream."""
        order, queue = self.order, self.order.use(port.stream)
        if isinstance(port, ReceivingPort):
            port.put_on(queue)
        future = op.result
        self._ports[future] = port
        self._indices[future] = self._at
        self._streamed[future] = port
        done = self._done[future] = self._event_behind(op)
        freed = None
        if isinstance(op, Recv | CopyStart) and op.slot is not None:
            chan = op.chan if isinstance(op, Recv) else _OF_HOST
            freed = self._freed.setdefault((chan, op.slot), StreamEvent(order))
            self._slots[future] = freed
        source = self._register(op.operands[0]) if op.operands else None
        if isinstance(op, CopyStart) and op.memory is not None:
            source = self._paired(op.operands[0], op.memory)
        return instructions.issue(
            port,
            self._code.registers,
            source,
            queue,
            done,
            StreamEvent(order),
            order.compute,
            freed,
        )

    def _paired(self, value: Value, memory: Value) -> int:
        """A register for a value together with the memory that it is copied to."""
        target = len(self._code.template)
        self._code.registers.append(None)
        self._code.template.append(None)
        sources = self._register(value), self._register(memory)
        pair = host.gathered(self._code.registers, sources, target, tuple)
        self._emit(pair, InstructionInfo(Role.COMPUTE, sources, (target,)))
        return target

    def _event_behind(self, op: Op) -> StreamEvent:
        """The event behind an op; the ops of a batch share one, which the last of them records."""
        batch = batch_of(op)
        if batch is None:
            return StreamEvent(self.order)
        return self._batches.setdefault(batch, StreamEvent(self.order))

    def _bind_wait(self, op: Wait) -> None:
        source, queue = op.operands[0], self.order.use(stream_of(op))
        port = self._streamed.get(source)
        if port is None:
            super()._bind_wait(op)
            staged = self._ports.get(source)
            if isinstance(staged, StagedPort) and staged.landed and queue is not self.order.compute:
                self._emit(instructions.follow_device(staged.landed, queue), KEEP)
            event = self._events.get(source)  # none for what was there before the program began
            if event is not None:
                self._emit(instructions.follow(event, queue), KEEP)
            return
        done = self._done[source]
        if isinstance(port, SettlingPort):
            super()._bind_wait(op)
            return
        is_first = self._layout.first_waits.get(source) is op
        if is_first and op.results and not isinstance(op.result.type, UnitType):
            target = self._register(op.result)
            run = instructions.arrive(port, self._code.registers, target, queue, done)
            self._emit(run, self._arriving(source, target))
        else:
            self._emit(instructions.follow(done, queue), KEEP)

    def _arriving(self, future: Value, target: int) -> InstructionInfo:
        return InstructionInfo(Role.AWAIT, (), (target,))

    def _bind_free(self, op: Free) -> None:
        """Let the compute stream wait for the named values: memory is used again in its order."""
        for value in op.operands[1:]:
            awaited = self._elsewhere.get(value)
            event = (
                None if awaited is None else self._done.get(awaited) or self._events.get(awaited)
            )
            if event is not None:
                self._emit(instructions.follow(event, self.order.compute), KEEP)
        super()._bind_free(op)

    def awaited_outside(self, graph: int) -> list[StreamEvent]:
        """The events of messages that a graph waits for, and that were issued outside of it."""
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
            self._emit(instructions.record(freed, self.order.compute), KEEP)
        if future in self._streamed:
            self._ports.pop(future)
        else:
            super()._release(future)


def _recorded(event: Event, queue: DeviceQueue) -> bool:
    event.record(queue)
    return True


_OF_HOST = -1
"""Stands for a channel where slots are the host's."""


def stream_of(op: Op) -> Stream:
    """The stream of an op: the one that the program names, else the usual one of its kind."""
    if op.stream is not None:
        return op.stream
    if isinstance(op, Send):
        return Stream.SEND
    if isinstance(op, Recv):
        return Stream.RECV
    if isinstance(op, CopyStart):
        return op.home_stream
    return Stream.COLLECTIVE if isinstance(op, Collective) else Stream.COMPUTE


STAGED = 1 << 20
"""The most bytes of an input that is copied on the host first."""


def landed(value: Any, device: Device) -> Any:
    """A value for work on the device: a tensor that is elsewhere is copied there.

    Its memory may be written to as soon as this returns. The device reads pinned memory later, when
    it comes to it, so it reads a copy, which torch keeps until then. A small tensor goes by pinned
    memory as well, since the host would wait while the device copies other memory.
    """
    if isinstance(value, Tensor) and value.device != device.torch_device:
        if value.is_pinned() or (value.device.type == "cpu" and value.nbytes <= STAGED):
            value = device.host_buffer(value).copy_(value)
        return value.to(device.torch_device, non_blocking=True)
    return value


def _carried(value: Value) -> object:
    return value.type.value if isinstance(value.type, FutureType) else value.type


def _handing_over(body: Body, function: Function) -> Body:
    """A body that takes and gives memory of the host as what copies take and give."""
    gives_host = any(map(is_on_host, function.outputs))

    def run(*inputs: Any) -> Any:
        outputs = body(*(v.memory if isinstance(v, HostCopy) else v for v in inputs))
        if not gives_host:
            return outputs
        (memory,) = outputs
        return (HostCopy(memory, tuple(memory.shape), memory.stride(), True),)

    return _StatefulRun(run, body.state, body.trained) if isinstance(body, StatefulBody) else run


@dataclass(frozen=True)
class _StatefulRun:
    """A body with code around it; it works on the same tensors."""

    run: Body
    state: Callable[[], Sequence[Tensor]]
    trained: Callable[[], Sequence[Tensor]]

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        return self.run(*inputs)


def _on_device(body: Body, function: Function, device: Device) -> Body:
    """A body with the device as torch's default, and tensors that it returns brought there."""
    target = device.torch_device
    tensors = [isinstance(type_, TensorType) for type_ in function.outputs]

    def run(*inputs: Any) -> Any:
        with target:
            outputs = body(*inputs)
        if True not in tensors or len(outputs) != len(tensors):
            return outputs
        return tuple(
            value.to(target) if moves and isinstance(value, torch.Tensor) else value
            for value, moves in zip(outputs, tensors, strict=True)
        )

    return run
