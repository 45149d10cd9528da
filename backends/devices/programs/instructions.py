"""The instructions of programs on devices: they put work on streams and never block."""

from __future__ import annotations

from ...device import DeviceQueue, Event
from ...program.instructions import Instruction, Registers
from ..ports import StreamPort
from ..stream_order import StreamEvent


def record(event: StreamEvent, queue: DeviceQueue) -> Instruction:
    """Record an event on a stream."""

    def run() -> bool:
        event.record(queue)
        return True

    return run


def follow(event: StreamEvent, queue: DeviceQueue) -> Instruction:
    """Let a stream wait for an event of the program."""

    def run() -> bool:
        event.wait(queue)
        return True

    return run


def follow_device(event: Event, queue: DeviceQueue) -> Instruction:
    """Let a stream wait for an event of the device."""

    def run() -> bool:
        queue.wait_event(event)
        return True

    return run


def issue(
    port: StreamPort,
    registers: Registers,
    source: int | None,
    queue: DeviceQueue,
    done: StreamEvent,
    ready: StreamEvent,
    compute: DeviceQueue,
    freed: StreamEvent | None,
) -> Instruction:
    """Put a communication op on its stream.

    Args:
        source: the operand's register, if it has one.
        queue: the op's stream.
        done: recorded behind the op.
        ready: recorded on the compute stream behind the work that the port prepares there.
        freed: the event behind which the op's slot is free, if it has one.
    """
    start, must_prepare, prepare = port.start, port.must_prepare, port.prepare

    def run() -> bool:
        value = None if source is None else registers[source]
        if must_prepare(value):
            value = prepare(value)
            ready.record(compute)
            ready.wait(queue)
        if freed is not None:
            freed.wait(queue)
        start(value)
        done.record(queue)
        return True

    return run


def arrive(
    port: StreamPort, registers: Registers, target: int, queue: DeviceQueue, done: StreamEvent
) -> Instruction:
    """Let a stream wait for a communication op; its value is for work on that stream."""
    take = port.take

    def run() -> bool:
        done.wait(queue)
        registers[target] = take()
        return True

    return run
