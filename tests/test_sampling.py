"""Which cases of a grid a default run takes."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from .sampling import covering

ROWS, COLUMNS = ("a", "b", "c", "d"), (object(), object(), object())
GRID = [{"row": row, "column": column} for row, column in product(ROWS, COLUMNS)]


@pytest.mark.parametrize(("times", "cases"), [(1, 4), (2, 8), (3, 12), (9, 12)])
def test_each_value_occurs_so_often(times: int, cases: int) -> None:
    chosen = covering(GRID, times)
    assert len(chosen) == cases
    assert chosen == sorted(set(chosen))
    for name in ("row", "column"):
        there = Counter(id(case[name]) for case in GRID)
        found = Counter(id(GRID[number][name]) for number in chosen)
        assert all(found[value] >= min(times, count) for value, count in there.items())


def test_a_list_of_cases_is_taken_whole() -> None:
    assert covering([{"case": row} for row in ROWS], 1) == [0, 1, 2, 3]


def test_there_may_be_no_cases() -> None:
    assert covering([], 1) == []
