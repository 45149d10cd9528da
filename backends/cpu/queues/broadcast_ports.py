"""The ports of an object's broadcast inside one machine: the root writes it once, and all read it.

They use the queues of the group's other collectives, in one order with them. Where another
collective is under way, or the object is not small, the broadcast runs as all other collectives do.
"""

from __future__ import annotations

from typing import Any

from ....ir.ops import Broadcast
from ....ir.types import ValueType
from ...poison import Poison
from .collectives import CollectivePort, GroupQueues
from .local_receiver import LocalReceiver
from .local_sender import LocalSender
from .object_ports import ObjectRecvPort, small


class BroadcastSendPort(CollectivePort):
    """The root's port."""

    def __init__(
        self, op: Broadcast, group: GroupQueues, operand: ValueType, queue: LocalSender
    ) -> None:
        super().__init__(op, group, operand, operand)
        self._queue = queue

    def start(self, value: Any) -> None:
        content, mark = small(value)
        if content is not None and self._group.is_idle and self._queue.send_small(content, mark):
            self.done, self._error, self._value = True, None, value
        else:
            super().start(value)


class BroadcastRecvPort(CollectivePort):
    """The port of every other member."""

    def __init__(
        self, op: Broadcast, group: GroupQueues, result: ValueType, queue: LocalReceiver
    ) -> None:
        super().__init__(op, group, None, result)
        self._port = ObjectRecvPort(queue)
        self._at_once = False

    def start(self, value: Any) -> None:
        self._at_once = self._group.is_idle
        if self._at_once:
            self._port.start(None)
        else:
            super().start(value)

    def fail(self, poison: Poison) -> None:
        self.start(None)

    def poll(self) -> bool:
        return self._port.poll() if self._at_once else super().poll()

    def peek_error(self) -> Poison | None:
        return self._port.peek_error() if self._at_once else None

    def take(self) -> Any:
        return self._port.take() if self._at_once else super().take()
