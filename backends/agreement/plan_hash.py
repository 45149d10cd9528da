"""Compare the plan of all ranks by its hash, once, before the first run."""

from __future__ import annotations

import hashlib

from ...ir.ops.module import Module
from ...ir.text.printer import format_module
from ..base import World
from ..errors import PlanMismatch
from .gather import ADVICE, disagreement


def plan_hash(module: Module) -> str:
    """SHA-256 of the module's text form, in hexadecimal. Source locations do not count."""
    return hashlib.sha256(format_module(module).encode()).hexdigest()


def check_plan(module: Module, world: World) -> str:
    """Compare the plan's hash with that of every other rank; collective.

    Returns:
        The hash.

    Raises:
        PlanMismatch: the ranks hold different plans; raised on every rank.
    """
    digest = plan_hash(module)
    if len(set(world.allgather(digest))) == 1:
        return digest
    texts = world.allgather(format_module(module))
    raise PlanMismatch(f"the ranks have compiled different plans: {disagreement(texts)}{ADVICE}")
