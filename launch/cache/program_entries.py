"""Programs in the compile cache: what all passes have made of a traced module.

A program follows from the text of the traced module, the schedule, the options of passes and cg's
own code: passes are pure functions. It is kept where making it has taken long, as a search does.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...ir.ops.module import Module
from ...ir.phases import Phase
from ...ir.text.diagnostics import IRError
from ...ir.text.parser import parse_module
from ...ir.text.printer import format_module
from ...ir.text.stored_programs import open_module
from ...ir.verify.verifier import verify, verify_program
from ...passes.manager.manager import PassReport
from .canonical import Unkeyable, canonical
from .compile_cache import CompileCache
from .source_digest import source_digest

_LOG = logging.getLogger("cg")
_KIND = "programs"

LONG = 0.02
"""Seconds; a program that is made faster is not kept, since reading it would gain little."""


@dataclass(frozen=True)
class Scheduled:
    """A module that the passes have scheduled.

    Attributes:
        module: the programs.
        reports: what each pass did.
        choice: what a search chose and why, a line for each pipeline of the step; empty if the
            schedule does not search.
        is_other: whether the schedule is another one than was asked for, of which a warning tells.
    """

    module: Module
    reports: list[PassReport]
    choice: str
    is_other: bool = False

    @property
    def remarks(self) -> list[str]:
        """Lines on the decisions of passes, for users."""
        return [remark for report in self.reports for remark in report.remarks]


def from_cache(
    cache: CompileCache,
    module: Module,
    text: str,
    options: Sequence[Any],
    make: Callable[[], Scheduled],
    long: float = LONG,
    rank: int | None = None,
) -> Scheduled:
    """The programs of a traced module, of an earlier start or made now.

    Programs that were read are verified like fresh ones, and ranks compare their digest. A rank
    that runs one of them reads that alone; the others are read when something asks for them.

    Args:
        cache: where to look.
        module: traced.
        text: of the module, with locations.
        options: all else that `make` depends on.
        make: makes the programs.
        long: the seconds from which on they are kept.
        rank: the one that this process runs; None: it runs several, or needs to know them all.
    """
    if not cache.is_on:
        return make()
    try:
        key = _key(text, options)
    except Unkeyable as reason:
        _LOG.info("compile cache: the programs of step %s are not kept: %s", module.name, reason)
        return make()
    for kept in cache.read(_KIND, key):
        scheduled = _parsed(kept, module, rank)
        if scheduled is not None:
            _LOG.debug("compile cache: the programs of step %s are those of before", module.name)
            return scheduled
    began = time.perf_counter()
    scheduled = make()
    seconds = time.perf_counter() - began
    if seconds >= long and not scheduled.is_other:
        cache.keep(_KIND, key, lambda: _text(scheduled))
        _LOG.debug("compile cache: the programs of step %s took %.2f s", module.name, seconds)
    return scheduled


def _key(text: str, options: Sequence[Any]) -> str:
    """All that programs depend on: the text of a traced module, with locations, and options.

    Raises:
        Unkeyable: an option has no text.
    """
    return "\0".join((source_digest(), text, canonical(tuple(options))))


def _text(scheduled: Scheduled) -> str:
    facts = {"choice": scheduled.choice, "reports": list(map(asdict, scheduled.reports))}
    return f"{json.dumps(facts)}\n{format_module(scheduled.module, locations=True)}"


def _parsed(text: str, traced: Module, rank: int | None) -> Scheduled | None:
    """The programs of a text; None if it does not hold valid ones for such a step."""
    facts, _, program = text.partition("\n")
    try:
        content = json.loads(facts)
        reports = [PassReport(**{**r, "remarks": tuple(r["remarks"])}) for r in content["reports"]]
        module = _read_all(program) if rank is None else _read_own(program, rank)
        scheduled = Scheduled(module, reports, content["choice"])
    except (ValueError, KeyError, TypeError, IRError) as error:
        _LOG.info("compile cache: programs of step %s are damaged: %s", traced.name, error)
        return None
    if (module.name, module.world, module.phase) != (traced.name, traced.world, Phase.SCHEDULED):
        return None
    return scheduled


_WHERE = "the compile cache"


def _read_all(text: str) -> Module:
    """The programs of all ranks, verified.

    Raises:
        IRError: they are not well formed.
    """
    module = parse_module(text, _WHERE)
    verify(module)
    return module


def _read_own(text: str, rank: int) -> Module:
    """The programs of all ranks, of which that of one rank is read and verified.

    Each rank does so with its own, and ranks compare the digest of the text.

    Raises:
        IRError, ValueError: it is not well formed.
    """
    module = open_module(text, _WHERE)
    if len(module.programs) != module.world:
        raise ValueError(f"there are {len(module.programs)} programs for {module.world} ranks")
    verify_program(module, module.program_of(rank))
    return module
