"""Who has the core, told by how long yields take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cg.backends.cpu.waiting.contention import LASTS, LONG, Crowd

SLICE, TURN = 4e-3, 5e-6


def crowds(yields: list[float]) -> list[bool]:
    """What is said behind each of some yields, of so many seconds each."""
    crowd, now, said = Crowd(), 100.0, []
    for seconds in yields:
        said.append(crowd.saw(now, now + seconds))
        now += seconds
    return said


def test_one_who_works_is_seen_at_the_second_long_yield() -> None:
    assert crowds([TURN] * 50 + [SLICE] * 3) == [False] * 51 + [True] * 2


def test_he_is_seen_beside_a_rank_that_waits() -> None:
    assert crowds([SLICE, TURN] * 3) == [False] * 4 + [True, False]


def test_pauses_now_and_then_are_no_crowd() -> None:
    assert not any(crowds(([SLICE] + [TURN] * 8) * 100))


@given(st.lists(st.floats(0.0, LONG * 0.9)))
def test_short_yields_never_are(yields: list[float]) -> None:
    assert not any(crowds(yields))


def test_it_lasts_until_it_is_not_seen_any_more() -> None:
    crowd = Crowd()
    assert crowd.is_over(1.0)
    crowd.saw(1.0, 1.004)
    assert crowd.saw(1.004, 1.008)
    assert not crowd.is_over(1.008 + LASTS * 0.9)
    assert crowd.is_over(1.008 + LASTS * 1.1)
