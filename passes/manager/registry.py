"""Register passes by name, and read the text form of pipelines and switches.

The text of a pipeline is, for instance, `cse,insert-transfers{broadcast_from=4}`: options stand in
braces, separated by commas.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import TypeVar

from ..base import OptionError, Pass, Pipeline
from ..check.check_deadlock import CheckDeadlock
from ..check.check_races import CheckRaces
from ..check.check_types import CheckTypes
from ..frontend.cse import CommonSubexpressionElimination
from ..frontend.dce import DeadCodeElimination
from ..frontend.differentiate import Differentiate
from ..frontend.fsdp import Fsdp
from ..frontend.inline import Inline
from ..frontend.share_reads import ShareReads
from ..lower.assemble_in_place import AssembleInPlace
from ..lower.assign_streams import AssignStreams
from ..lower.batch_messages import BatchMessages
from ..lower.capture import Capture
from ..lower.fuse import Fuse
from ..lower.fuse_accumulation import FuseAccumulation
from ..lower.overlap import Overlap
from ..lower.plan_buffers import PlanBuffers
from ..lower.split_tails import SplitTails
from ..memory.offload import Offload
from ..memory.rest_state import RestState
from ..order.assign_stages import AssignStages
from ..order.schedule import SchedulePrograms
from ..placement.choose_dispatch import ChooseDispatch
from ..placement.choose_transports import ChooseTransports
from ..placement.insert_transfers import InsertTransfers
from ..placement.lower_transfers import LowerTransfers
from ..placement.place import PlaceReplicated
from ..placement.split_transfers import SplitTransfers

P = TypeVar("P", bound=type[Pass])

_PASSES: dict[str, type[Pass]] = {}
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_ITEM = re.compile(r"\s*([^\s,{}]+)\s*(?:\{([^{}]*)\})?\s*(,|$)")


class UnknownPassError(ValueError):
    """There is no pass of this name."""


def register(cls: P) -> P:
    """Register a pass by its name.

    Raises:
        ValueError: another pass has the name, or it is not in kebab-case.
    """
    if _NAME.fullmatch(cls.name) is None:
        raise ValueError(f"'{cls.name}' is no name for a pass; write it in kebab-case")
    if cls.name in _PASSES:
        raise ValueError(f"two passes are called '{cls.name}'")
    _PASSES[cls.name] = cls
    return cls


for _pass in (
    CheckDeadlock,
    CheckRaces,
    CheckTypes,
    CommonSubexpressionElimination,
    DeadCodeElimination,
    Differentiate,
    Fsdp,
    Inline,
    ShareReads,
    Fuse,
    FuseAccumulation,
    AssembleInPlace,
    AssignStreams,
    BatchMessages,
    Capture,
    Offload,
    RestState,
    Overlap,
    PlanBuffers,
    SplitTails,
    AssignStages,
    SchedulePrograms,
    ChooseTransports,
    InsertTransfers,
    ChooseDispatch,
    LowerTransfers,
    PlaceReplicated,
    SplitTransfers,
):
    register(_pass)


def names() -> tuple[str, ...]:
    """The names of all passes, sorted."""
    return tuple(sorted(_PASSES))


def lookup(name: str) -> type[Pass]:
    """The pass with a name.

    Raises:
        UnknownPassError: there is no such pass; the message lists all passes.
    """
    if name not in _PASSES:
        raise UnknownPassError(f"there is no pass '{name}'; the passes are {', '.join(names())}")
    return _PASSES[name]


def summary(name: str) -> str:
    """The first line of a pass's documentation."""
    return documentation(name).partition("\n")[0]


def documentation(name: str) -> str:
    """The documentation of a pass, with the IR before and after."""
    return inspect.cleandoc(lookup(name).__doc__ or "")


def parse_pipeline(text: str) -> Pipeline:
    """Read a pipeline; the text `""` is the empty pipeline.

    Raises:
        UnknownPassError: no pass has one of the names.
        OptionError: an option is unknown or unreadable, or the text is malformed.
    """
    passes: list[Pass] = []
    at = 0
    while at < len(text.rstrip()):
        item = _ITEM.match(text, at)
        if item is None:
            raise OptionError(
                f"cannot read the pipeline at '{text[at:].strip()}'; "
                "write pass,pass{option=value,option=value}"
            )
        name, options, _ = item.groups()
        passes.append(lookup(name).from_options(_parse_options(name, options or "")))
        at = item.end()
    return tuple(passes)


def _parse_options(name: str, text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key:
            raise OptionError(f"cannot read option '{part}' of pass '{name}'; write option=value")
        if key in options:
            raise OptionError(f"option '{key}' of pass '{name}' is given twice")
        options[key] = value
    return options


@dataclass(frozen=True)
class Switches:
    """The passes that are switched off by name, as in `-overlap,-cse`, or on again."""

    on: frozenset[str] = frozenset()
    off: frozenset[str] = frozenset()

    def then(self, later: Switches) -> Switches:
        """Both switches combined; on a pass that both name, the later one decides."""
        return Switches((self.on - later.off) | later.on, (self.off - later.on) | later.off)

    def apply(self, pipeline: Pipeline) -> Pipeline:
        """The passes of a pipeline that are to run."""
        return tuple(pass_ for pass_ in pipeline if pass_.name not in self.off)


def parse_switches(text: str) -> Switches:
    """Read switches: `-name` switches a pass off, `+name` on again; `""` changes nothing.

    Raises:
        UnknownPassError: no pass has one of the names.
        OptionError: a sign is missing, a name has both signs, or the pass is not optional.
    """
    chosen: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        sign, name = part[0], part[1:].strip()
        if sign not in "+-":
            raise OptionError(f"switch '{part}' has no sign; write +{part} or -{part}")
        if sign == "-" and not lookup(name).optional:
            can = ", ".join(n for n in names() if _PASSES[n].optional)
            raise OptionError(
                f"pass '{name}' cannot be switched off: no program runs without it; "
                f"those that can are {can or 'none'}"
            )
        if chosen.setdefault(lookup(name).name, sign) != sign:
            raise OptionError(f"pass '{name}' is switched both on and off")
    return Switches(
        frozenset(name for name, sign in chosen.items() if sign == "+"),
        frozenset(name for name, sign in chosen.items() if sign == "-"),
    )
