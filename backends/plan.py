"""Do all ranks hold the same plan? Asked once, before the first run."""

from __future__ import annotations

import hashlib
from itertools import zip_longest

from ..ir.module import Module
from ..ir.printer import format_module
from ..ir.types import format_ranks
from .base import World
from .errors import PlanMismatch


def plan_hash(module: Module) -> str:
    """SHA-256 of the module's text form, in hexadecimal. Source locations do not count."""
    return _hash(format_module(module))


def check_plan(module: Module, world: World) -> str:
    """Compare the plan's hash with that of every other rank; collective.

    Returns:
        The hash.

    Raises:
        PlanMismatch: the ranks hold different plans; raised on every rank.
    """
    text = format_module(module)
    digest = _hash(text)
    digests = world.allgather(digest)
    if len(set(digests)) == 1:
        return digest
    raise PlanMismatch(_describe(world.allgather(text)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _describe(texts: list[str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    one, other = list(groups)[:2]
    names = [f"ranks {format_ranks(tuple(ranks))}" for ranks in groups.values()]
    number, left, right = _first_difference(one, other)
    return (
        f"the ranks have compiled different plans: {' and '.join(names)} disagree. "
        f"The first line that differs is line {number}:\n"
        f"  {names[0]}: {left}\n"
        f"  {names[1]}: {right}\n"
        "Every rank must run the same script and trace the same step with the same values: look "
        "for something that depends on the rank, on time, on unseeded random numbers, or on the "
        "order of a set"
    )


def _first_difference(one: str, other: str) -> tuple[int, str, str]:
    lines = zip_longest(one.splitlines(), other.splitlines(), fillvalue="(nothing)")
    for number, (left, right) in enumerate(lines, 1):
        if left != right:
            return number, left.strip(), right.strip()
    raise AssertionError("texts that differ have a line that differs")
