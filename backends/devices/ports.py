"""Ports whose ops complete on a stream, so that the host goes on as soon as they are issued."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ...ir.attributes import Stream
from ..device import DeviceQueue
from ..poison import Poison


@runtime_checkable
class StreamPort(Protocol):
    """The port of an op that runs on a stream; see `Port` for the other methods.

    Instructions order the streams (`programs/instructions.py`). Before `start` an instruction lets
    the port's stream wait for what the operand needs; behind it an instruction records an event
    that others wait for. `take` gives a tensor that is complete when the stream has passed that
    event. Nobody looks into data on the device, so no poison travels in messages: `fail` raises it.

    Attributes:
        stream: the stream that the op runs on.
        landing: memory for the value; None if the op takes new memory each time.
        rehearses: whether `start` puts nothing on the stream.
    """

    stream: Stream
    landing: Tensor | None
    rehearses: bool

    def room(self) -> Tensor | None:
        """New memory for the value, as `prepare` takes it; None if `prepare` takes none."""

    def must_prepare(self, value: Any) -> bool:
        """True if `prepare` has something to do for this operand."""

    def prepare(self, value: Any) -> Any:
        """Put on the compute stream what has to happen before `start`; returns its operand.

        This also takes the memory of the result, which the compute stream may use until here.
        """

    def start(self, value: Any) -> None:
        """Put the op on its stream."""

    def fail(self, poison: Poison) -> None:
        """Raise the poison: it cannot travel."""

    def poll(self) -> bool:
        """True: the host waits for nothing."""

    def take(self) -> Any:
        """The value, for work behind the event."""

    def release(self) -> None:
        """Drop the value."""


@runtime_checkable
class ReceivingPort(Protocol):
    """The port of a receive, which may be on the compute stream."""

    def put_on(self, queue: DeviceQueue) -> None:
        """Receive on a stream: in the tail of a program, the tail's is its compute stream."""
