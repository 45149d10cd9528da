"""The plan's hash, and the message where ranks disagree."""

from __future__ import annotations

import re
import threading
from typing import Any

from cg.backends.agreement.plan_hash import check_plan, plan_hash
from cg.backends.errors import PlanMismatch
from cg.backends.virtual.world import VirtualWorld
from cg.ir.ops.module import Module

from .programs import CHAIN, module


class Hall(VirtualWorld):
    """One rank of a world of threads; gathers what each brings."""

    is_virtual = False

    def __init__(self, size: int, barrier: threading.Barrier, board: list[Any], rank: int) -> None:
        super().__init__(size)
        self._barrier = barrier
        self._board = board
        self._mine = rank
        self.gathered: list[Any] = []

    def allgather(self, value: Any) -> list[Any]:
        self._board[self._mine] = value
        self._barrier.wait(10)
        result = list(self._board)
        self._barrier.wait(10)
        self.gathered.append(value)
        return result


def check_all(modules: list[Module]) -> tuple[list[Any], list[Hall]]:
    size = len(modules)
    barrier, board = threading.Barrier(size), [None] * size
    halls = [Hall(size, barrier, board, rank) for rank in range(size)]
    outcomes: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = check_plan(modules[rank], halls[rank])
        except PlanMismatch as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return outcomes, halls


def test_equal_plans_have_equal_hashes_and_exchange_no_text() -> None:
    elsewhere = CHAIN.replace("chain.py", "other.py")
    modules = [module(CHAIN), module(elsewhere), module(CHAIN)]
    outcomes, halls = check_all(modules)
    assert outcomes == [plan_hash(modules[0])] * 3
    for hall in halls:
        (contribution,) = hall.gathered
        assert re.fullmatch("[0-9a-f]{64}", contribution.value)


def test_a_virtual_world_agrees_with_itself() -> None:
    plan = module(CHAIN)
    assert check_plan(plan, VirtualWorld(3)) == plan_hash(plan)


def test_a_mismatch_names_the_ranks_and_the_first_line() -> None:
    changed = CHAIN.replace("call(%x) {fn = @a.inc}", "call(%x) {fn = @a.inc, mb = 1}")
    outcomes, _ = check_all([module(CHAIN), module(changed), module(CHAIN)])
    assert all(isinstance(outcome, PlanMismatch) for outcome in outcomes)
    message = str(outcomes[1])
    assert message == str(outcomes[0])
    assert "ranks {0,2} and ranks {1} disagree" in message
    assert "ranks {0,2}: %h = call(%x) {fn = @a.inc} : f32[4]\n" in message
    assert "ranks {1}: %h = call(%x) {fn = @a.inc, mb = 1} : f32[4]\n" in message
    assert "Every rank must run the same script" in message


def test_a_plan_that_is_longer_than_another_differs_where_it_goes_on() -> None:
    text = "module @m phase=scheduled world=1 {\n  program @0() { RETURN }\n}"
    longer = text.replace("RETURN", "%c = constant() {fill = 1} : i64[]\n return()")
    outcomes, _ = check_all([module(text.replace("RETURN", "return()")), module(longer)])
    assert "line 3:\n  ranks {0}: return()\n  ranks {1}: %c = constant()" in str(outcomes[0])
