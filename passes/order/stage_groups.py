"""Find the ranks of each stage, and the ranks that count as one in a schedule."""

from __future__ import annotations

from collections.abc import Mapping

from ...ir.ops import Call, Op
from ...ir.ops.module import Function


class StageGroups:
    """The stages of a step, each with its round and its ranks.

    A schedule orders the tasks of ranks. The ranks of a group run a stage together, so a group
    counts as one rank in a schedule. Groups with a common rank count as one rank together, as their
    tasks take turns there.
    """

    def __init__(self) -> None:
        self._rounds: dict[int, int] = {}
        self._ranks: dict[int, tuple[int, ...]] = {}
        # The stages whose ranks are known from an actor's call.
        self._settled: set[int] = set()

    def enter(self, stage: int, op: Op, functions: Mapping[str, Function], round_: int) -> None:
        """Note an op of a stage's forward."""
        self._rounds[stage] = max(self._rounds.get(stage, round_), round_)
        if stage in self._settled or op.place is None:
            return
        if isinstance(op, Call) and functions[op.fn.name].actor is not None:
            self._ranks[stage] = op.place.ranks
            self._settled.add(stage)
        else:
            self._ranks.setdefault(stage, op.place.ranks)

    def stages(self) -> dict[int, tuple[int, int]]:
        """For each stage its round, and the lowest of the ranks that count as one with its own."""
        lowest: dict[int, int] = {}

        def root(rank: int) -> int:
            while (lower := lowest.setdefault(rank, rank)) != rank:
                rank = lower
            return rank

        for ranks in self._ranks.values():
            roots = [root(rank) for rank in ranks]
            lowest.update(dict.fromkeys(roots, min(roots)))
        return {
            stage: (round_, root(self._ranks[stage][0]))
            for stage, round_ in self._rounds.items()
            if stage in self._ranks
        }
