"""Say where the texts of ranks differ, which must be equal on all of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import zip_longest
from typing import TypeVar

from ..types import format_ranks

T = TypeVar("T", bound=Hashable)


def named(ranks: Sequence[int]) -> str:
    """Ranks in words: `rank 2`, `ranks 0, 1 and 3`."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def grouped(values: Sequence[T]) -> dict[T, list[int]]:
    """Group the ranks by their values, which are in the order of ranks."""
    groups: dict[T, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return groups


def disagreement(texts: Sequence[str | None]) -> str:
    """Name the ranks with different texts, and the first line in which two of them differ.

    Args:
        texts: by rank; at least two differ. A rank that has none does not count.
    """
    groups = grouped(texts)
    groups.pop(None, None)
    one, other = [text for text in groups if text is not None][:2]
    names = [f"ranks {format_ranks(tuple(ranks))}" for ranks in groups.values()]
    number, left, right = _first_line(one, other)
    return (
        f"{' and '.join(names)} disagree. The first line that differs is line {number}:\n"
        f"  {names[0]}: {left}\n"
        f"  {names[1]}: {right}\n"
    )


def _first_line(one: str, other: str) -> tuple[int, str, str]:
    lines = zip_longest(one.splitlines(), other.splitlines(), fillvalue="(nothing)")
    for number, (left, right) in enumerate(lines, 1):
        if left != right:
            return number, left.strip(), right.strip()
    raise AssertionError("texts that differ have a line that differs")
