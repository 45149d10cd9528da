"""Compare the plan of all ranks by its hash, once, before the first run."""

from __future__ import annotations

import hashlib

from ...ir.ops.module import Module
from ...ir.text.printer import format_module
from ..base import World
from .gather import ADVICE, ComparedText, agree


def plan_hash(module: Module) -> str:
    """SHA-256 of the module's text form, in hexadecimal. Source locations do not count."""
    return hashlib.sha256(format_module(module).encode()).hexdigest()


def check_plan(module: Module, world: World) -> str:
    """Compare the plan with that of every other rank; collective.

    Returns:
        The plan's hash.

    Raises:
        PlanMismatch: the ranks hold different plans; raised on every rank.
    """
    parts = {"plan": ComparedText("in what they run,", format_module(module))}
    agree(world, "the ranks have compiled different plans", parts, ADVICE)
    return plan_hash(module)
