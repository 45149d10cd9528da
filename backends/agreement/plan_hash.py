"""Compare the plan of all ranks by its hash, once, before the first run."""

from __future__ import annotations

import hashlib

from ...ir.ops.module import Module
from ...ir.text.printer import format_module
from ...ir.text.stored_plan import StoredPrograms
from ..base import World
from .gather import ADVICE, ComparedText, agree


def plan_hash(module: Module) -> str:
    """SHA-256 of the module's text form, in hexadecimal; source locations do not count.

    Of programs in a file it is the digest of the file, so that no rank has to read all of them.
    """
    return _compared(module)[0]


def check_plan(module: Module, world: World) -> str:
    """Compare the plan with that of every other rank; collective.

    Returns:
        The plan's hash.

    Raises:
        PlanMismatch: the ranks hold different plans; raised on every rank.
    """
    digest, text = _compared(module)
    parts = {"plan": ComparedText("in what they run,", text)}
    agree(world, "the ranks have compiled different plans", parts, ADVICE)
    return digest


def _compared(module: Module) -> tuple[str, str]:
    """The hash of a module, and the text that ranks compare."""
    if isinstance(module.programs, StoredPrograms):
        return module.programs.digest, module.programs.digest
    text = format_module(module)
    return hashlib.sha256(text.encode()).hexdigest(), text
