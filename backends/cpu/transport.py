"""The CPU transport of a process: what it shares with other ranks, made once for all steps."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.module import Channel
from ..base import Communicator, World
from .communicator import CpuCommunicator
from .control import Control
from .node import MpiWorld, Node
from .waiting import Waiter, WaitPolicy


class CpuTransport:
    """Shared memory, bells and control of this process. Making one is collective.

    Attributes:
        node: the processes of this machine.
        control: begins, ends and fails executions on all ranks together.

    Raises:
        TransportError: the processes cannot share memory.
        FenceError: this machine has no memory fence that Python can reach.
    """

    def __init__(self, world: MpiWorld, policy: WaitPolicy | None = None) -> None:
        self.node = Node(world)
        self.control = Control(self.node, policy)

    @property
    def pause(self) -> Waiter:
        """How a rank waits."""
        return self.control.pause

    def communicator(self, world: World, channels: Sequence[Channel]) -> Communicator:
        """The factory of communicators (`CommunicatorFactory`); collective."""
        return CpuCommunicator(self.node, channels)

    def close(self) -> None:
        """Say goodbye to the other ranks, and give everything back; idempotent."""
        self.control.close()
        self.node.close()
