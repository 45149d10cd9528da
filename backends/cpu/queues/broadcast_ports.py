"""The ports of a broadcast object inside one machine: its root writes it once, and all read it.

They take the same lanes as every collective of the group, in the order of its collectives. Where
one is under way already, or the object does not suit, it goes as every collective does.
"""

from __future__ import annotations

from typing import Any

from ...failures.poison import Poison
from .collectives import CollectivePort, Group
from .local import LocalReceiver, LocalSender
from .object_ports import ObjectRecvPort, small


class BroadcastSendPort:
    """The root's port."""

    __slots__ = ("_at_once", "_group", "_lane", "_slow", "_value")

    holds = False

    def __init__(self, group: Group, lane: LocalSender, slow: CollectivePort) -> None:
        self._group = group
        self._lane = lane
        self._slow = slow
        self._at_once = False
        self._value: Any = None

    def start(self, value: Any) -> None:
        """See `Port`."""
        content, mark = small(value)
        if content is not None and self._group.is_idle and self._lane.put(content, mark):
            self._at_once = True
            self._value = value
            return
        self._at_once = False
        self._slow.start(value)

    def fail(self, poison: Poison) -> None:
        """See `Port`."""
        self._at_once = False
        self._slow.fail(poison)

    def poll(self) -> bool:
        """See `Port`."""
        return self._at_once or self._slow.poll()

    def take(self) -> Any:
        """See `Port`."""
        if not self._at_once:
            return self._slow.take()
        value, self._value = self._value, None
        return value

    def release(self) -> None:
        """See `Port`."""


class BroadcastRecvPort:
    """The port of every other member."""

    __slots__ = ("_at_once", "_group", "_port", "_slow")

    holds = False

    def __init__(self, group: Group, lane: LocalReceiver, slow: CollectivePort) -> None:
        self._group = group
        self._port = ObjectRecvPort(lane)
        self._slow = slow
        self._at_once = False

    def start(self, value: Any) -> None:
        """See `Port`."""
        self._at_once = self._group.is_idle
        if self._at_once:
            self._port.start(None)
        else:
            self._slow.start(value)

    def fail(self, poison: Poison) -> None:
        """See `Port`."""
        self.start(None)

    def poll(self) -> bool:
        """See `Port`."""
        return self._port.poll() if self._at_once else self._slow.poll()

    def peek_error(self) -> Poison | None:
        """See `Port`."""
        return self._port.peek_error() if self._at_once else None

    def take(self) -> Any:
        """See `Port`."""
        return self._port.take() if self._at_once else self._slow.take()

    def release(self) -> None:
        """See `Port`."""
