"""How often a process that waits gives way, by what its yields say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from cg.backends.cpu.control import serving
from cg.backends.cpu.control.rank_status import State
from cg.backends.cpu.memory.layout import ROW, STATE
from cg.backends.cpu.waiting.contention import SHORTEST
from cg.backends.errors import PeerLost

EMPTY, SHARED, SLICE = 0.5e-6, 5e-6, 4e-3


class Clock:
    """Yields that take as long as they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.each = EMPTY
        self.yields = 0
        monkeypatch.setattr(serving, "perf_counter", self.read)
        monkeypatch.setattr(serving, "sched_yield", self.give_way)

    def read(self) -> float:
        self.now += 50e-9
        return self.now

    def give_way(self) -> None:
        self.now += self.each
        self.yields += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def shared_words(machines: int = 1) -> memoryview[int]:
    """Words that ranks share, one rank a machine: the first says that rank 0 wants to be woken."""
    return memoryview(bytearray(8 * ROW * machines)).cast("Q")


def process(words: memoryview[int], hear: Callable[[], None] = lambda: None) -> Any:
    """A process of rank 0."""
    machines = len(words) // ROW
    node: Any = SimpleNamespace(
        rank=0,
        size=machines,
        leaders=tuple(range(machines)),
        words=words,
        waiting=lambda rank: rank,
        fence=lambda: None,
        is_rung=machines == 1,
        bell=SimpleNamespace(dead=set(), wait=lambda seconds: None),
    )
    return serving.Serving(node, hear, lambda *_, **__: "")


def waits(turns: int, words: memoryview[int] | None = None) -> Any:
    """A process that has waited for some turns."""
    made = process(shared_words() if words is None else words)
    for polls in range(1, turns + 1):
        made.pause(polls, None)
    return made


@pytest.mark.parametrize("state", [State.EXITED, State.DESERTED])
def test_only_a_rank_that_leaves_open_graphs_is_missed(clock: Clock, state: State) -> None:
    """One that ends in order has heard the driver close them, maybe earlier than this rank."""
    words = shared_words(machines=2)
    made = process(words, hear=lambda: words.__setitem__(ROW + STATE, state))
    missed = state is State.DESERTED
    expected = pytest.raises(PeerLost, match="rank 1 has ended while") if missed else nullcontext()
    with expected:
        for polls in range(1, 2000):
            made.pause(polls, None)
    assert words[ROW + STATE] == state


def test_who_has_a_core_looks_several_times_before_each_yield(clock: Clock) -> None:
    waits(400)
    assert 400 / 5 < clock.yields < 400 / 4


@pytest.mark.parametrize(("turn", "quiet"), [(0.2e-6, 27), (0.5e-6, 11), (20e-6, 3)])
def test_who_has_a_core_does_not_yield_in_short_waits(
    clock: Clock, turn: float, quiet: int
) -> None:
    process = waits(0)

    def wait(turns: int) -> int:
        before = clock.yields
        for polls in range(1, turns + 1):
            clock.now += turn
            process.pause(polls, None)
        return clock.yields - before

    wait(400)
    assert wait(quiet) == wait(quiet) == 0
    assert wait(quiet + 1) == 1


def test_who_took_long_once_goes_back_to_no_yields_in_short_waits(clock: Clock) -> None:
    process = waits(1)
    for polls in range(1, 401):
        clock.now += 1.0  # the core was taken away
        process.pause(polls, None)
    yields = []
    for _ in range(20):
        before = clock.yields
        clock.now += 1.0  # between waits there may be anything
        for polls in range(1, 7):
            process.pause(polls, None)
        yields.append(clock.yields - before)
    assert yields == [1] * 5 + [0] * 15


def test_who_only_waits_shortly_yields_now_and_then(clock: Clock) -> None:
    process = waits(400)
    before = clock.yields
    for _ in range(320):
        for polls in range(1, 9):
            process.pause(polls, None)
    assert clock.yields - before == pytest.approx(10, abs=1)


def test_who_shares_one_yields_after_each_look(clock: Clock) -> None:
    clock.each = SHARED
    waits(400)
    assert clock.yields == 400


def test_who_has_to_share_it_again_soon_does(clock: Clock) -> None:
    process = waits(400)
    before = clock.yields
    clock.each = SHARED
    for polls in range(401, 501):
        process.pause(polls, None)
    assert clock.yields - before >= 96


def contended(clock: Clock, words: memoryview[int] | None = None) -> Any:
    """A process whose latest yields have shown contention."""
    process = waits(0, words)
    clock.each = SLICE
    process.pause(1, None)
    process.pause(2, None)
    return process


def test_who_shares_one_with_somebody_who_works_sleeps_without_a_yield(clock: Clock) -> None:
    words = shared_words()
    process = contended(clock, words)
    for _ in range(3):  # waits, one after the other
        before = clock.yields
        process.pause(1, None)
        process.pause(2, None)
        assert words[0] == 1  # asks to be woken
        assert clock.yields == before


def test_when_contention_may_be_over_the_next_wait_yields_again(clock: Clock) -> None:
    words = shared_words()
    process = contended(clock, words)
    clock.now += SHORTEST
    clock.each = EMPTY
    before = clock.yields
    for polls in range(1, 401):
        process.pause(polls, None)
    assert clock.yields > before + 1
    assert words[0] == 0


def test_a_wait_that_sleeps_goes_on_sleeping_when_contention_is_over(clock: Clock) -> None:
    process = contended(clock)
    process.pause(1, None)
    clock.now += SHORTEST
    before = clock.yields
    for polls in range(2, 10):
        process.pause(polls, None)
    assert clock.yields == before


def test_each_wait_says_that_nobody_needs_to_ring(clock: Clock) -> None:
    words = shared_words()
    process = waits(1, words)
    words[0] = 1
    process.pause(1, None)
    assert words[0] == 0
