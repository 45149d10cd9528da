"""The order of work on streams while a graph is captured: an edge only where none implies it.

A stream that waits for an event stands behind two things then: what it has done, and the event. If
the event is itself behind all that the stream has done, the first edge says nothing new. A GPU
takes time for it nevertheless: a chain of kernels and collectives on two streams is then no chain,
and each step of it takes several microseconds longer. So such a stream is put behind the event
alone, and a stream that is behind an event already does not wait for it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..device import Device, Event, Queue

Nodes = tuple[Any, ...]
Steps = Mapping[Queue, int]
"""For each stream, how far: the number of the latest of its steps."""


@dataclass(frozen=True)
class Mark:
    """Where a stream was when an event was recorded.

    Attributes:
        nodes: of the graph, the last ones on the stream; None where the device cannot tell.
        last: the steps that these nodes are.
        behind: all steps that come before what waits for the event.
    """

    nodes: Nodes | None
    last: Steps
    behind: Steps


class CaptureOrder:
    """What each stream stands behind in the capture in progress."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._count = 0
        self._at: dict[Queue, tuple[Nodes, Steps]] = {}
        self._behind: dict[Queue, dict[Queue, int]] = {}

    def mark(self, queue: Queue) -> Mark:
        """Where a stream is; what was put on it since it was last asked is a step."""
        nodes = self._device.nodes(queue)
        if nodes is None:
            return Mark(None, {}, {})
        behind = self._behind.setdefault(queue, {})
        position = self._at.get(queue)
        if position is None or position[0] != nodes:
            self._count += 1
            behind[queue] = self._count
            position = self._at[queue] = (nodes, {queue: self._count})
        return Mark(nodes, position[1], dict(behind))

    def wait(self, queue: Queue, event: Event, mark: Mark) -> None:
        """Let a stream wait for an event that was recorded at a mark."""
        if mark.nodes is None:
            queue.wait_event(event)
            return
        behind = self._behind.get(queue, {})
        if _reaches(behind, mark.last):
            return
        last = self._last(queue)
        if last and mark.nodes and _reaches(mark.behind, last):
            self._device.follow_alone(queue, event, mark.nodes)
            self._at[queue] = (mark.nodes, mark.last)
        else:
            queue.wait_event(event)
            nodes = self._device.nodes(queue)
            if last is None or nodes is None:
                self._at.pop(queue, None)
            else:
                self._at[queue] = (nodes, _merged(last, mark.last))
        self._behind[queue] = _merged(behind, mark.behind)

    def _last(self, queue: Queue) -> Steps | None:
        """The steps that a stream stands behind; none at its start, None if they are unknown."""
        nodes = self._device.nodes(queue)
        if not nodes:
            return {}
        known_nodes, last = self._at.get(queue, (None, None))
        return last if known_nodes == nodes else None


def _reaches(behind: Steps, steps: Steps) -> bool:
    return all(behind.get(queue, 0) >= number for queue, number in steps.items())


def _merged(one: Steps, two: Steps) -> dict[Queue, int]:
    return {queue: max(one.get(queue, 0), two.get(queue, 0)) for queue in {*one, *two}}
