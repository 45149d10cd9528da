"""Compare the plan of all ranks by its hash, once, before the first run."""

from __future__ import annotations

import hashlib

from ...ir.ops.module import Module
from ...ir.text.printer import format_module
from ...ir.text.stored_programs import StoredPrograms
from ..base import World
from .gather import ADVICE, ComparedText, agree, gather


def plan_hash(module: Module) -> str:
    """SHA-256 of the module's text form, in hexadecimal; source locations do not count.

    Of programs in a text it is what was made of that when it was opened, so that no rank has to
    read all of them.
    """
    if isinstance(module.programs, StoredPrograms):
        return module.programs.digest
    return hashlib.sha256(format_module(module).encode()).hexdigest()


def check_plan(module: Module, world: World) -> str:
    """Compare the plan with that of every other rank; collective.

    Returns:
        The plan's hash.

    Raises:
        PlanMismatch: the ranks hold different plans; raised on every rank.
    """
    digest, subject = plan_hash(module), "the ranks have compiled different plans"
    if world.is_virtual:
        return digest
    if len(set(gather(world, f"the question whether {subject}", digest))) > 1:
        text = f"{format_module(module)}// {digest}\n"  # the digests alone may differ
        agree(world, subject, {"plan": ComparedText("in what they run,", text)}, ADVICE)
    return digest
