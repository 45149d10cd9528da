"""Contention of a core, told by how long yields take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cg.backends.cpu.waiting.contention import LONG, LONGEST, NEAR, SHORTEST, Contention

SLICE, TURN = 4e-3, 5e-6


def verdicts(yields: list[float]) -> list[bool]:
    """The verdicts behind each of some yields, of so many seconds each."""
    contention, now, said = Contention(), 100.0, []
    for seconds in yields:
        said.append(contention.note(now, now + seconds))
        now += seconds
    return said


def seen_at(seconds: float, contention: Contention) -> float:
    """The end of two long yields from then on."""
    contention.note(seconds, seconds + SLICE)
    assert contention.note(seconds + SLICE, seconds + 2 * SLICE)
    return seconds + 2 * SLICE


def test_one_who_works_is_seen_at_the_second_long_yield() -> None:
    assert verdicts([TURN] * 50 + [SLICE] * 3) == [False] * 51 + [True] * 2


def test_he_is_seen_beside_ranks_that_give_way_to_each_other() -> None:
    assert verdicts([SLICE, *[TURN] * 300, SLICE]) == [False] * 301 + [True]


def test_pauses_now_and_then_are_no_contention() -> None:
    assert not any(verdicts(([SLICE] + [TURN] * int(1.1 * NEAR / TURN)) * 10))


@given(st.lists(st.floats(0.0, LONG * 0.9)))
def test_short_yields_never_are(yields: list[float]) -> None:
    assert not any(verdicts(yields))


def test_it_lasts_until_it_is_not_seen_any_more() -> None:
    contention = Contention()
    assert not contention.is_on(1.0)
    seen = seen_at(1.0, contention)
    assert contention.is_on(seen + SHORTEST * 0.9)
    assert not contention.is_on(seen + SHORTEST * 1.1)


def test_where_it_goes_on_it_is_looked_for_less_often() -> None:
    contention = Contention()
    now = seen_at(1.0, contention)
    lengths = []
    for _ in range(6):
        began = now
        while contention.is_on(now):
            now += 1e-3
        lengths.append(round(now - began, 2))
        assert contention.note(now, now + SLICE)  # one long yield is enough
        now += SLICE
    assert lengths == [SHORTEST, *(min(SHORTEST * 2**n, LONGEST) for n in range(1, 6))]


def test_after_a_quiet_time_it_lasts_as_short_as_at_first() -> None:
    contention = Contention()
    now = seen_at(1.0, contention) + SHORTEST * 1.1
    assert contention.note(now, now + SLICE)
    seen = seen_at(now + 1.0, contention)
    assert not contention.is_on(seen + SHORTEST * 1.1)
