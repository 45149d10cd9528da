"""Run the tail of a program on a stream of its own, beside what the rank does next.

The tail of a program waits for a message that comes back to the rank, and does the rest of the work
(see the pass `split-tails`). Only the tail waits: the compute stream goes on with the next
execution. So work on what a tail has touched waits for the tail by an event: later executions by
the locks of its actors, and the caller when it takes the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ....ir.attributes import Stream
from ...device import Device, DeviceQueue, Event
from ...program.instructions import Instruction, Registers
from ...program.ticket_locks import TicketLock
from ..stream_order import StreamOrder


class Tail:
    """The tail of one bound program, as one instruction of it.

    Args:
        instructions: its instructions, bound to `order`.
        registers: of the program.
        reads: the registers that it reads and has not written.
        main: the streams of the work in front of it.
        order: its own streams.
        locks: of the actors that it touches.

    Attributes:
        ended: the event behind the tail of the last execution; None before the first.
    """

    def __init__(
        self,
        instructions: Sequence[Instruction],
        registers: Registers,
        reads: Sequence[int],
        main: StreamOrder,
        order: StreamOrder,
        locks: Sequence[TicketLock],
    ) -> None:
        self.ended: Event | None = None
        self._instructions = tuple(instructions)
        self._registers = registers
        self._reads = tuple(reads)
        self._main = main
        self._order = order
        self._locks = tuple(locks)
        self._begun = main.device.event()

    def __call__(self) -> bool:
        """Put the tail on its stream, behind the work in front of it."""
        main, order, device = self._main, self._order, self._main.device
        main.join()
        self._hold()
        self._begun.record(main.compute)
        order.compute.wait_event(self._begun)
        with device.on(order.compute):
            for instruction in self._instructions:
                instruction()
            order.join()
        # A new event each time: the caller may wait for this one after another execution has ended.
        self.ended = device.event()
        self.ended.record(order.compute)
        for lock in self._locks:
            lock.ended = self.ended
        return True

    def _hold(self) -> None:
        """Copy what the tail reads, which others may write to before the tail has read it.

        The caller may write to an input as soon as the execution is done, and the next execution to
        the state of an actor, of which a method may have returned a part.
        """
        registers, copies = self._registers, []
        for register in self._reads:
            value = registers[register]
            if isinstance(value, Tensor):
                registers[register] = value.clone()
                copies.append(registers[register])
        self._main.device.keep(copies, self._order.compute)


def follow_tails(device: Device, queues: Iterable[DeviceQueue]) -> None:
    """Let streams go on behind all tails that have been put on the device."""
    if not device.has(Stream.TAIL):
        return
    ended = device.event()
    ended.record(device.stream(Stream.TAIL))
    for queue in queues:
        queue.wait_event(ended)


def last_stream(device: Device) -> DeviceQueue:
    """A stream behind all that programs have put on the device so far, tails included."""
    compute = device.stream(Stream.COMPUTE)
    if not device.has(Stream.TAIL):
        return compute
    # The tail stream loses nothing by that: each tail is behind the compute stream anyway.
    passed, tails = device.event(), device.stream(Stream.TAIL)
    passed.record(compute)
    tails.wait_event(passed)
    return tails
