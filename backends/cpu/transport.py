"""The CPU transport of a process: all that it shares with other ranks, made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...ir.ops.module import Channel
from ..base import Communicator, World
from .communicator import CpuCommunicator
from .control.control import Control
from .control.divergence import out_of_step
from .control.rank_status import State
from .waiting.node import MachineNode, MpiWorld
from .waiting.waiting import Waiter


class CpuTransport:
    """Shared memory, bells and control of this process. Making one is collective.

    Attributes:
        node: the processes of this machine.
        control: begins, ends and fails executions on all ranks together.

    Raises:
        TransportError: the processes cannot share memory.
        TransportError: this machine has no memory fence that Python can reach.
    """

    def __init__(self, world: MpiWorld) -> None:
        self.node = MachineNode(world)
        self.control = Control(self.node)
        self._resets: tuple[Callable[[], None], ...] = ()

    @property
    def pause(self) -> Waiter:
        """The pause of this rank's waits."""
        return self.control.pause

    def communicator(self, world: World, channels: Sequence[Channel]) -> Communicator:
        """The factory of communicators (`CommunicatorFactory`); collective."""
        return CpuCommunicator(self.node, channels)

    def fail(
        self, error: BaseException | None, refused: bool, resets: Sequence[Callable[[], None]]
    ) -> BaseException:
        """Tell every rank that the execution has failed here.

        Args:
            error: what was raised here; None where that comes of a failure on another rank.
            refused: whether that was before this rank began its program.
            resets: called by `recover_if_due`, once all ranks have come, to make this rank ready
                for another execution.

        Returns:
            The error that all ranks raise.
        """
        self._resets = tuple(resets)
        return self.control.fail(error, refused)

    def recover_if_due(self) -> None:
        """Start afresh if the last execution has failed; every rank calls it before the next.

        The next execution waits for the other ranks, and the failed one does not, so a rank can
        raise at once while another is still busy.

        Raises:
            StepTimeout, TransportError: a rank does not come.
            TransportError: the ranks have diverged. Each may have begun a step that others have
                not, so they cannot agree on what comes next.
        """
        if self.control.diverged is not None:
            raise out_of_step(self.control.diverged)
        if self.control.failed:
            self.control.recover(self._resets)

    def close(self, deserts: bool = False) -> None:
        """Say goodbye to the other ranks, and give everything back; idempotent.

        Args:
            deserts: whether graphs are open here, so that the others cannot go on.
        """
        self.control.close(State.DESERTED if deserts else State.EXITED)
        self.node.close()
