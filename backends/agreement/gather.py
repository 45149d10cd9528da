"""Gather and compare what ranks say before they continue together.

Before each execution ranks compare two numbers, of the plan and of the arguments, by a store into
shared memory (`backends/cpu/control`); all else that they must agree on goes by `agree`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ...ir.text.differences import disagreement, grouped, named
from ..base import World
from ..errors import PlanMismatch

T = TypeVar("T")

SAME_CALLS: Final = "Every rank must make the same calls in the same order"
"""Advice for ranks that have come to different calls."""

ADVICE: Final = (
    "Every rank must run the same script, and trace the same step with the same values: look for "
    "something that depends on the rank, on time, on unseeded random numbers, or on the order of a "
    "set"
)
"""Advice for ranks that have traced or compiled different steps."""


@dataclass(frozen=True, slots=True)
class ComparedText:
    """One of the texts that must be equal on all ranks.

    Attributes:
        words: its name in messages, such as `the seed is`; ranks may have different words.
        text: the rank's text, which is compared.
    """

    words: str
    text: str


@dataclass(frozen=True, slots=True)
class _Contribution:
    """A value that a rank gives to the others, and its purpose."""

    purpose: str
    value: Any


def gather(world: World, purpose: str, value: T) -> list[T]:
    """Gather the values of all ranks, and check that all give them for the same purpose.

    Args:
        world: all ranks.
        purpose: what the value is for, in words for messages.
        value: this rank's value, which must be picklable.

    Returns:
        The values, by rank.

    Raises:
        PlanMismatch: the ranks have different purposes, for example after an error that one rank
            alone has caught.
    """
    answers: list[Any] = world.allgather(_Contribution(purpose, value))
    purposes = [
        answer.purpose if isinstance(answer, _Contribution) else "another call"
        for answer in answers
    ]
    groups = grouped(purposes)
    if len(groups) > 1:
        shown = ", and ".join(f"{named(ranks)} to {text}" for text, ranks in groups.items())
        raise PlanMismatch(
            f"the ranks have come to different calls: {shown}. {SAME_CALLS}: look for an error "
            "that one rank alone has caught, or for a call that depends on the rank"
        )
    return [answer.value for answer in answers]


def agree(world: World, subject: str, parts: Mapping[str, ComparedText], advice: str) -> None:
    """Check that all ranks have the same parts; collective.

    Args:
        world: all ranks.
        subject: what the ranks do, for messages: `the ranks have ...`.
        parts: the parts to compare, by keys that are the same on all ranks, in the order in which
            to report differences.
        advice: for the user, about a difference.

    Raises:
        PlanMismatch: a part differs. All ranks raise it, and can go on afterwards.
    """
    if world.is_virtual:
        return
    own_hash = hashlib.sha256(repr([(key, part.text) for key, part in parts.items()]).encode())
    if len(set(gather(world, f"the question whether {subject}", own_hash.hexdigest()))) == 1:
        return
    everywhere = world.allgather({key: (part.words, part.text) for key, part in parts.items()})
    raise PlanMismatch(f"{subject}: {_first_difference(everywhere)}{advice}")


def _first_difference(everywhere: Sequence[Mapping[str, tuple[str, str]]]) -> str:
    """Name the first part that differs, by rank; parts that all ranks have come first."""
    keys = list(dict.fromkeys(key for parts in everywhere for key in parts))
    keys.sort(key=lambda key: any(key not in parts for parts in everywhere))
    for key in keys:
        texts = [parts[key][1] if key in parts else "(nothing)" for parts in everywhere]
        groups = grouped(texts)
        if len(groups) == 1:
            continue
        words = next(parts[key][0] for parts in everywhere if key in parts)
        if any("\n" in text for text in groups):
            return f"{words} {disagreement(texts)}"
        shown = (f"{text} on {named(ranks)}" for text, ranks in groups.items())
        return f"{words} {', and '.join(shown)}. "
    first = next(
        rank_keys for rank_keys in zip(*everywhere, strict=True) if len(set(rank_keys)) > 1
    )
    shown = (f"{key} on {named(ranks)}" for key, ranks in grouped(first).items())
    return f"their order differs: where it begins to, there is {', and '.join(shown)}. "
