"""The order of work on a rank's streams: events that one stream records and another waits for.

Parts of a program may be captured as graphs, each of which runs on one stream as a whole: the
compute stream, or that of tails. A graph cannot wait for an event outside of it, and nothing
outside can wait for an event in a graph. Neither is needed: a graph has ended when its stream goes
on, and before the graph begins, its stream waits for what the graph needs. So an event is only
waited for where it was recorded: in the same graph, or outside of all.
"""

from __future__ import annotations

from ...ir.attributes import Stream
from ..device import Device, DeviceQueue, Event
from .capture_order import CaptureOrder, Mark

OUTSIDE = 0
"""The place of events that no graph holds."""


class StreamOrder:
    """The streams of one bound program, or of its tail.

    Args:
        base: the stream that is its compute stream.

    Attributes:
        device: whose streams they are.
        compute: the stream that others fork from and join.
        place: the capture in progress, by number; `OUTSIDE` if there is none.
        captured: the order of streams in that capture, or in the last one.
    """

    def __init__(self, device: Device, base: Stream = Stream.COMPUTE) -> None:
        self.device = device
        self.compute = device.stream(base)
        self.place = OUTSIDE
        self.captured = CaptureOrder(device)
        self._captures = 0
        self._sides: dict[Stream, StreamEvent] = {}
        self._fork = StreamEvent(self)
        self._is_forked = False

    @property
    def queues(self) -> list[DeviceQueue]:
        """All streams that the program puts work on."""
        return [self.compute, *map(self.device.stream, self._sides)]

    def use(self, stream: Stream) -> DeviceQueue:
        """The queue of a stream that the program puts work on."""
        if stream is Stream.COMPUTE:
            return self.compute
        if stream not in self._sides:
            self._sides[stream] = StreamEvent(self)
        return self.device.stream(stream)

    def fork(self) -> None:
        """Let the other streams wait for the compute stream."""
        self._is_forked = self._is_forked or self.place == OUTSIDE
        self._fork.record(self.compute)
        for stream in self._sides:
            self._fork.wait(self.device.stream(stream))

    def join(self) -> None:
        """Let the compute stream wait for the others, if they have forked from it."""
        if self.place == OUTSIDE:
            if not self._is_forked:
                return
            self._is_forked = False
        for stream, event in self._sides.items():
            event.record(self.device.stream(stream))
            event.wait(self.compute)

    def begin_capture(self) -> None:
        """Put the work that follows into a graph."""
        self._captures += 1
        self.place = self._captures
        self.captured = CaptureOrder(self.device)

    def end_capture(self) -> None:
        """Put the work that follows into no graph."""
        self.place = OUTSIDE


class StreamEvent:
    """A place in a stream that others wait for; see `Event`."""

    __slots__ = ("_captured", "_event", "_order", "_place")

    _captured: tuple[Event, Mark]

    def __init__(self, order: StreamOrder) -> None:
        self._order = order
        self._event = order.device.event()
        self._place = -1

    @property
    def is_outside(self) -> bool:
        """True if it was last recorded outside of graphs."""
        return self._place == OUTSIDE

    def has_passed(self) -> bool:
        """True if its stream has passed it, as last recorded outside of graphs; for any thread.

        Raises:
            RuntimeError: the device has failed.
        """
        return self._event.query()

    def record(self, queue: DeviceQueue) -> None:
        """Record the event on a stream."""
        order = self._order
        self._place = order.place
        if order.place == OUTSIDE:
            self._event.record(queue)
            return
        # An event that belongs to a graph is of no use outside of it.
        event = order.device.event()
        event.record(queue)
        self._captured = event, order.captured.mark(queue)

    def wait(self, queue: DeviceQueue) -> None:
        """Let a stream wait for the event, if it was recorded in the capture in progress.

        Outside of captures, streams wait for events that were recorded outside of them.
        """
        place = self._order.place
        if self._place != place:
            return
        if place == OUTSIDE:
            queue.wait_event(self._event)
        else:
            self._order.captured.wait(queue, *self._captured)
