"""The order of work on a rank's streams: marks that one stream sets and another waits for.

Some of a program may be captured as graphs, which run on the compute stream as a whole. A graph
cannot wait for a mark that is outside of it, nor the other way round. None needs to: what is in a
graph is over when the compute stream goes on, and what a graph needs from outside the compute
stream waits for before the graph begins. So a mark is only waited for where it was set.
"""

from __future__ import annotations

from ...ir.attributes import Stream
from .base import Device, Event, Queue

OUTSIDE = 0
"""Where marks are that no graph holds."""


class Flow:
    """The streams of one bound program.

    Attributes:
        device: whose streams they are.
        compute: the stream that others fork from and join.
        place: the capture in progress, by number; `OUTSIDE` if there is none.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.compute = device.stream(Stream.COMPUTE)
        self.place = OUTSIDE
        self._captures = 0
        self._sides: dict[Stream, Mark] = {}
        self._fork = Mark(self)
        self._is_forked = False

    def use(self, stream: Stream) -> Queue:
        """The queue of a stream that the program puts work on."""
        queue = self.device.stream(stream)
        if stream is not Stream.COMPUTE and stream not in self._sides:
            self._sides[stream] = Mark(self)
        return queue

    def fork(self) -> None:
        """Let the other streams go on from where the compute stream is."""
        self._is_forked = self._is_forked or self.place == OUTSIDE
        self._fork.record(self.compute)
        for stream in self._sides:
            self._fork.wait(self.device.stream(stream))

    def join(self) -> None:
        """Let the compute stream go on behind the others, if they have gone on by themselves."""
        if self.place == OUTSIDE:
            if not self._is_forked:
                return
            self._is_forked = False
        for stream, mark in self._sides.items():
            mark.record(self.device.stream(stream))
            mark.wait(self.compute)

    def begin_capture(self) -> None:
        """What is put on streams from now on belongs to a graph."""
        self._captures += 1
        self.place = self._captures

    def end_capture(self) -> None:
        """It no longer does."""
        self.place = OUTSIDE


class Mark:
    """A place in a stream that others wait for; see `Event`."""

    __slots__ = ("_captured", "_event", "_flow", "_place")

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._event = flow.device.event()
        self._captured: Event | None = None
        self._place = -1

    @property
    def is_outside(self) -> bool:
        """Whether it was last set where no graph holds it."""
        return self._place == OUTSIDE

    def has_passed(self) -> bool:
        """Whether its stream has passed it, as it was last set outside of graphs; for any thread.

        Raises:
            RuntimeError: the device has failed.
        """
        return self._event.query()

    def record(self, queue: Queue) -> None:
        """Mark where the stream is now."""
        flow = self._flow
        self._place = flow.place
        if flow.place == OUTSIDE:
            self._event.record(queue)
            return
        # An event that belongs to a graph is of no use outside of it.
        self._captured = flow.device.event()
        self._captured.record(queue)

    def wait(self, queue: Queue) -> None:
        """Let a stream wait for the mark, if it is where the stream is; see above."""
        place = self._flow.place
        if self._place == place:
            queue.wait_event(self._event if place == OUTSIDE else self._captured)
