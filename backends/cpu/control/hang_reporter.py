"""The reporter of hangs: says where ranks are, for all waits of a process that do not end.

Steps, driven graphs, calls of the world and watchdogs of devices call it. For
the work of a device see `backends/devices/programs/pending_work.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...failures.flight import ASKING, FlightRecord, where_ranks_are
from ..waiting.node import MachineNode
from .rank_status import StatusTable


class HangReporter:
    """Asks ranks what they do, and describes those that cannot be asked by what they have told.

    Args:
        node: this machine, whose ranks can be asked.
        table: what all ranks have told.
    """

    def __init__(self, node: MachineNode, table: StatusTable) -> None:
        self._node = node
        self._table = table

    def where(
        self,
        ranks: Sequence[int],
        records: Sequence[FlightRecord] = (),
        seconds: float = ASKING,
    ) -> str:
        """Describe where ranks are, in a line or more each; for any thread.

        Args:
            ranks: to ask.
            records: of executions in progress, whose ranks are described besides.
            seconds: how long to wait for answers.
        """
        asked = [rank for rank in ranks if not self._table.has_ended(rank)]
        sights = self._node.world.look(asked, seconds)
        told = {rank: self._table.whereabouts(rank) for rank in ranks}
        for rank in asked:
            told[rank] += f"{self._unasked(rank)}\n    it is {self._node.process(rank)}"
        return where_ranks_are(records, sights, told)

    def _unasked(self, rank: int) -> str:
        """Why a rank gives no answer, so that it may be elsewhere than it has told."""
        if rank == self._node.rank:
            return ""
        return "; it cannot be asked" + ", as those of other machines" * (
            not self._node.is_local(rank)
        )
