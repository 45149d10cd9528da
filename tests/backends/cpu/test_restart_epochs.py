"""How ranks wait for each other when they start their graphs over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cg.backends.cpu.control.rank_status import State
from cg.backends.cpu.control.restart_epochs import SharedRestartEpochs
from cg.backends.cpu.memory.layout import ROW, STATE
from cg.backends.errors import PeerLost


def machine(ranks: int) -> Any:
    """The memory that the rows of some ranks lie in."""
    words = memoryview(bytearray(8 * ROW * ranks)).cast("Q")
    return SimpleNamespace(
        rank=0, size=ranks, words=words, wake_all=lambda: None, fence=lambda: None
    )


def test_those_that_have_not_come_are_missed() -> None:
    node = machine(3)
    SharedRestartEpochs(node).reach(1)
    SharedRestartEpochs(SimpleNamespace(**{**vars(node), "rank": 2})).reach(1)
    assert SharedRestartEpochs(node).missing(1) == [1]
    assert SharedRestartEpochs(node).missing(0) == []


@pytest.mark.parametrize("how", [State.EXITED, State.DESERTED])
def test_a_rank_that_has_ended_is_not_waited_for(how: State) -> None:
    node = machine(3)
    epochs = SharedRestartEpochs(node)
    epochs.reach(1)
    node.words[ROW + STATE] = how
    with pytest.raises(PeerLost, match="rank 1 has ended, and this rank has to start") as caught:
        epochs.missing(1)
    assert caught.value.rank == 1
    assert epochs.missing(0) == []
