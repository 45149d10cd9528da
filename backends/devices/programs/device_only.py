"""Bind a program of a driven graph that devices run as a whole.

Hosts announce no messages. When the command for an execution has come, each host tells the others
that it can do its part. When all have, each puts its part on its streams, and the parts meet there.
A host that has begun must go through with it. So it first waits for the earlier executions that the
program depends on. The tail of the program, if it has one, has streams of its own: the next
execution does not wait for it.
"""

from __future__ import annotations

from itertools import chain
from typing import NoReturn

from torch import Tensor

from ....ir.attributes import MAIN, TAIL, Stream
from ....ir.ops import (
    Alloc,
    Call,
    Collective,
    Communication,
    Op,
    Recv,
    Reserve,
    Return,
    Value,
    Wait,
)
from ....ir.ops.module import FunctionKind
from ...base import Port
from ...device import Device, Event
from ...program.code import Code
from ...program.instruction_info import KEEP, InstructionInfo, Role
from ...program.instructions import Instruction
from ...program.linked import LinkedProgram
from ...program.ticket_locks import STREAMS, TicketLock, Tickets, locked_ops
from ..ports import StreamPort
from ..stream_order import StreamOrder
from .binder import DeviceBinder
from .capture import WARM_UPS
from .segments import cut, interface_of
from .tail import Tail, follow_tails, last_stream

Acquires = dict[int, list[Instruction]]


class DeviceOnlyBinder(DeviceBinder):
    """Binds one program; see `Binder`.

    Attributes:
        acquires: the number of instructions at the start of the program that wait for earlier
            executions.
        agreement: the register that holds the error if some rank cannot do its part; all work on
            the device depends on it.
        tail: the program's tail, if it has one.
    """

    def __init__(self, linked: LinkedProgram, tickets: Tickets, *, device: Device) -> None:
        super().__init__(linked, tickets, device=device)
        self.acquires = 0
        self.agreement = 0
        self._acquires: list[Instruction] = []
        self._releases: list[Instruction] = []
        self._ran = 0
        self.tail: Tail | None = None
        self._main = self.order
        self._awaited: list[TicketLock] = []
        self._receives = any(
            isinstance(op, Recv | Collective) and op.graph == MAIN for op in linked.program.ops
        )
        self._end = StreamOrder(device, Stream.TAIL) if self._has_tail() else self.order

    def bind(self) -> Code:
        """Bind the program.

        Raises:
            BindError: besides what every binder raises, an op of the program needs its host.
        """
        self._check_graphs()
        code = super().bind()
        self.acquires = len(self._acquires)
        self.order = self._main
        cut(code, self)
        self._put_off(code)
        self._awaited = self._locks_of(MAIN)
        self.agreement = len(code.template)
        code.registers.append(None)
        code.template.append(None)
        for index, info in enumerate(code.infos):
            if info.role is Role.COMPUTE:
                code.infos[index] = info._replace(sources=(*info.sources, self.agreement))
        ahead = (self._make_room, *self._land_inputs(code), self._catch_up)
        for instruction in reversed(ahead):
            code.insert(0, instruction, InstructionInfo(Role.COMPUTE, (self.agreement,)))
        code.put_first(self._acquires)
        self._at = max(len(self._program.ops) - 1, 0)
        for instruction in (self._join, *self._releases):
            self._emit(instruction, KEEP)
        return code

    def order_of(self, graph: int | None) -> StreamOrder:
        return self._end if graph == TAIL else self._main

    def forget(self) -> None:
        """Drop the graphs, whose messages no longer exist."""
        self._ran = 0
        for segment in self.segments:
            segment.forget()

    def end(self) -> Event:
        """An event behind this execution on the device and those before it, tails included."""
        if self.tail is not None and self.tail.ended is not None:
            return self.tail.ended
        ended = self.device.event()
        ended.record(last_stream(self.device))
        return ended

    def _has_tail(self) -> bool:
        return any(op.graph == TAIL for op in self._program.ops)

    def _check_graphs(self) -> None:
        """Refuse a program that is neither one graph nor a graph and its tail."""
        begun: set[Value] = set()
        reserved: set[Value] = set()
        is_tail = False
        for op in self._program.ops:
            if isinstance(op, Alloc | Return):
                continue
            is_tail = is_tail or op.graph == TAIL
            if op.graph != (TAIL if is_tail else MAIN):
                self._refuse(op)
            if isinstance(op, Communication) and not is_tail:
                begun.add(op.result)
            if isinstance(op, Reserve) and not is_tail:
                reserved.update(op.results)
            if is_tail and not reserved.isdisjoint(op.operands):
                self._fail(
                    op,
                    "a tail writes to what is reserved ahead of it",
                    "a tail has copies of what it reads: reserve storage in graph 1",
                )
            if isinstance(op, Wait) and is_tail and op.operands[0] in begun:
                self._fail(
                    op,
                    "a tail waits for a message that is begun ahead of it",
                    "await what is sent in graph 0, and post receives of graph 1 in graph 1",
                )

    def _refuse(self, op: Op) -> NoReturn:
        self._fail(
            op,
            f"`{op.opcode}` needs its host, and the messages of the step are part of graphs",
            "in a graph that one rank drives they are so only if devices can do everything",
        )

    def _bind_op(self, op: Op, arena: Tensor) -> None:
        if op.graph == TAIL and self.order is self._main:
            self.order = self._end
            # The whole tail comes behind the values that are made ahead of it. The next execution,
            # which receives into the same slots, comes behind the whole tail.
            self._events.clear()
            self._slots.clear()
        super()._bind_op(op, arena)

    def _put_off(self, code: Code) -> None:
        """Make the tail one instruction, which runs beside the next execution."""
        ops = self._program.ops
        within = [i for i, info in enumerate(code.infos) if ops[info.op].graph == TAIL]
        if not within:
            return
        first, last = within[0], within[-1] + 1
        interface = interface_of(code, self._program, first, last, self.escaping)
        self.tail = Tail(
            code.instructions[first:last],
            code.registers,
            interface.reads,
            self._main,
            self._end,
            self._locks_of(TAIL),
        )
        info = InstructionInfo(
            Role.COMPUTE, interface.reads, interface.gives, op=code.infos[first].op
        )
        code.instructions[first:last], code.infos[first:last] = [self.tail], [info]

    def _locks_of(self, graph: int) -> list[TicketLock]:
        """The locks of the actors that the ops of a graph touch."""
        assert self._tickets is not None, "several executions may be in flight"
        ops, functions = self._program.ops, self._module.functions
        touched = locked_ops(self._program, functions, self._layout.registers)
        return [
            self._tickets.lock(actor)
            for actor, indices in touched.items()
            if any(ops[index].graph == graph for index in indices)
        ]

    def _issue(self, op: Op, port: Port) -> None:
        if not isinstance(port, StreamPort):
            self._refuse(op)
        super()._issue(op, port)

    def _bind_call(self, op: Call) -> None:
        function = self._module.functions[op.fn.name]
        if function.kind is FunctionKind.OPAQUE or op.key is not None:
            self._refuse(op)
        super()._bind_call(op)

    def _make_locks(self) -> tuple[Acquires, Acquires]:
        """Keep the locks for the start and the end of the program; there are none among its ops."""
        acquires, releases = super()._make_locks()
        assert self._tickets is not None, "several executions may be in flight"
        acquire, release = self._tickets.acquire_and_release(STREAMS)
        self._acquires = [*chain.from_iterable(acquires.values()), acquire]
        self._releases = [*chain.from_iterable(releases.values()), release]
        return {}, {}

    def _make_room(self) -> bool:
        """Give memory back ahead of the first capture: a graph takes memory that nobody holds."""
        if self._ran == WARM_UPS:
            self.device.give_back()
        self._ran += 1
        return True

    def _catch_up(self) -> bool:
        """Wait for tails that have touched the same actors, and for the program's own last tail.

        If the program receives, it waits for all tails: its messages come behind those of tails.
        """
        compute = self._main.compute
        if self._receives:
            follow_tails(self.device, (compute,))
            return True
        ended = [lock.ended for lock in self._awaited]
        if self.tail is not None:
            ended.append(self.tail.ended)
        for event in dict.fromkeys(ended):
            if event is not None:
                compute.wait_event(event)
        return True

    def _join(self) -> bool:
        self._main.join()
        return True
