"""The order of work on streams while a graph is captured: an edge only where none implies it.

A stream that waits for an event depends on two things: the work that it has done, and the event. If
the event itself comes after all work of the stream, the first edge says nothing new. A GPU takes
time for it nevertheless: a chain of kernels and collectives on two streams is then no chain, and
each step of it takes several microseconds longer. So such a stream is made to depend on the event
alone, and a stream that depends on an event already does not wait for it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..device import Device, DeviceQueue, Event

Nodes = tuple[Any, ...]
Steps = Mapping[DeviceQueue, int]
"""For each stream, the number of the latest of its steps."""


@dataclass(frozen=True)
class Mark:
    """The position of a stream when an event was recorded on it.

    Attributes:
        nodes: the last nodes of the graph on the stream; None where the device cannot tell.
        last: the steps that these nodes are.
        behind: all steps that come before work that waits for the event.
    """

    nodes: Nodes | None
    last: Steps
    behind: Steps


class CaptureOrder:
    """The graph nodes that each stream depends on in the capture in progress."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._count = 0
        self._at: dict[DeviceQueue, tuple[Nodes, Steps]] = {}
        self._behind: dict[DeviceQueue, dict[DeviceQueue, int]] = {}

    def mark(self, queue: DeviceQueue) -> Mark:
        """The position of a stream; work that was put on it since the last call is a new step."""
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

    def wait(self, queue: DeviceQueue, event: Event, mark: Mark) -> None:
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

    def _last(self, queue: DeviceQueue) -> Steps | None:
        """The steps that a stream directly depends on: none at its start, None if unknown."""
        nodes = self._device.nodes(queue)
        if not nodes:
            return {}
        known_nodes, last = self._at.get(queue, (None, None))
        return last if known_nodes == nodes else None


def _reaches(behind: Steps, steps: Steps) -> bool:
    return all(behind.get(queue, 0) >= number for queue, number in steps.items())


def _merged(one: Steps, two: Steps) -> dict[DeviceQueue, int]:
    return {queue: max(one.get(queue, 0), two.get(queue, 0)) for queue in {*one, *two}}
