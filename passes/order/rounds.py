"""Number the rounds of a step: the loops over microbatches that cannot be one pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.ops import (
    Assemble,
    Collective,
    Constant,
    Copy,
    Op,
    Recv,
    Send,
    Slice,
    Transfer,
    View,
    Wait,
)

_MOVING = (Copy, Transfer, Slice, Assemble, Send, Recv, Wait, Collective)
_TRANSPARENT = (Constant, View, *_MOVING)


class Rounds:
    """The rounds of a step, op by op.

    A step may run through its microbatches, do something with all of them, such as an update, and
    run through microbatches again with the result. Each such run is a round, with a pipeline of its
    own. If an op outside of the microbatches follows an op of a round, a forward that follows it
    belongs to a later round.
    """

    def __init__(self) -> None:
        # 2r: in round r. 2r + 1: after ops of round r, but outside of it. -1: before all rounds.
        self._states: list[int] = []
        # The first stage of each round.
        self._first: dict[int, int] = {}

    def enter(self, op: Op, before: Sequence[int], forward: bool) -> int:
        """The round of the next op.

        Args:
            op: the op.
            before: the indices of the ops that it follows.
            forward: whether it is work of a forward.
        """
        states = self._states
        state = max([states[index] for index in before], default=-1)
        if forward:
            state = max(state + state % 2, 0)
            if op.task is not None:
                state = self._after_earlier_stages(op.task.stage, state)
        elif op.mb is None and state >= 0 and not isinstance(op, _TRANSPARENT):
            state |= 1
        states.append(state)
        return state // 2

    def _after_earlier_stages(self, stage: int, state: int) -> int:
        """The state of a stage's work, which is in no earlier round than the stages before it.

        The schedule may put work of those stages into the same task, and a rank runs it first.
        """
        floors = [2 * round_ for round_, first in self._first.items() if first <= stage]
        state = max([state, *floors])
        self._first[state // 2] = min(stage, self._first.get(state // 2, stage))
        return state
