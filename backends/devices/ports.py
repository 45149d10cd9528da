"""Ports whose ops complete on a stream, so that the host goes on as soon as they are issued."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ...ir.attributes import Stream
from ..poison import Poison


@runtime_checkable
class StreamPort(Protocol):
    """The port of an op that a stream carries out; see `Port` for the rest.

    Instructions order streams (`programs/instructions.py`): before `start` one lets the port's
    stream wait for what the operand needs, and behind it one records an event that others wait for.
    `take` gives a tensor that is there when the stream has passed that event. Nobody looks into
    data on the device, so there is no poison in messages: `fail` raises it.

    Attributes:
        stream: which stream carries it out.
        landing: memory for the value, if the op is not to take new memory each time.
        rehearses: whether `start` puts nothing on the stream.
    """

    stream: Stream
    landing: Tensor | None
    rehearses: bool

    def room(self) -> Tensor | None:
        """New memory for the value as `prepare` takes it; None if it takes none."""

    def must_prepare(self, value: Any) -> bool:
        """True if `prepare` has something to do for this operand."""

    def prepare(self, value: Any) -> Any:
        """Put on the compute stream what has to happen before `start`; the operand to start with.

        Memory for the result is taken here, too: it may be in use on the compute stream until now.
        """

    def start(self, value: Any) -> None:
        """Put the op on its stream."""

    def fail(self, poison: Poison) -> None:
        """Raise the poison: it cannot travel."""

    def poll(self) -> bool:
        """True: the host waits for nothing."""

    def take(self) -> Any:
        """The value, for work that is put behind the event."""

    def release(self) -> None:
        """Drop the value."""
