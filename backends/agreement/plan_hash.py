"""Do all ranks hold the same plan? Asked once, before the first run."""

from __future__ import annotations

import hashlib

from ...ir.module import Module
from ...ir.printer import format_module
from ..base import World
from ..errors import PlanMismatch
from .gather import ADVICE, disagreement


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
    raise PlanMismatch(
        f"the ranks have compiled different plans: {disagreement(world.allgather(text))}{ADVICE}"
    )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
