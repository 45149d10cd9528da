"""Restart epochs, in shared memory (`backends/driven/restart.py`)."""

from __future__ import annotations

from ...errors import PeerLost
from ..memory.layout import RESTART, RESTART_AT, ROW, STATE
from ..waiting.node import MachineNode
from .rank_status import State


class SharedRestartEpochs:
    """Restart epochs in the rows of the control block; `RestartEpochs` describes the methods.

    Args:
        node: this machine, which has all ranks.
    """

    def __init__(self, node: MachineNode) -> None:
        self._node = node
        self._row = node.rank * ROW

    @property
    def mine(self) -> int:
        return self._node.words[self._row + RESTART]

    def reach(self, epoch: int) -> None:
        self._node.fence()
        self._node.words[self._row + RESTART] = epoch
        self._node.wake_all()

    def missing(self, epoch: int) -> list[int]:
        """The ranks that have gone through fewer epochs.

        Raises:
            PeerLost: one of them has ended, and will not come.
        """
        node = self._node
        behind = [r for r in range(node.size) if node.words[r * ROW + RESTART] < epoch]
        for rank in behind:
            if node.words[rank * ROW + STATE] in (State.EXITED, State.DESERTED):
                raise PeerLost(
                    f"rank {rank} has ended, and this rank has to start its graphs over after an "
                    "interruption, which takes all ranks; start the job again",
                    rank,
                )
        if behind:
            node.wake_all()
        node.fence()  # from here on this rank sees what the others did before
        return behind

    def is_wanted(self, driver: int) -> bool:
        words, epoch = self._node.words, self.mine
        if self._node.rank != driver:  # a serving rank looks often, so at one word only
            return words[driver * ROW + RESTART] > epoch
        return any(words[rank * ROW + RESTART] > epoch for rank in range(self._node.size))

    def tell(self, number: int) -> None:
        self._node.words[self._row + RESTART_AT] = number

    def told(self, driver: int) -> int:
        return self._node.words[driver * ROW + RESTART_AT]
