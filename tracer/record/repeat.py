"""Run a step's Python twice, to check that it does the same in every execution.

A compiled step does not run its Python again. So a change outside of the step would happen only
once, and a number from a counter, a clock or a generator would never change. The second run costs
little, as all functions that the step calls are traced already. A change that only the first run
makes, such as filling a cache, does no harm.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.utils._pytree import tree_leaves

from ...ir.attributes import Symbol
from ...ir.location import Location
from ...ir.ops import Constant
from ...ir.ops.compare import program_difference
from ...ir.ops.module import Program
from ..errors import TraceError, different
from ..source import is_own_file, traceback_location
from ..values.heap.reach import reach_all
from ..values.heap.snapshot import GENERATORS, Snapshot, StateChange, same_bits
from ..values.specs import Static
from ..values.values import ObjectValue, StaleValue, TracedTensor
from .actors.actors import ActorHandle
from .session.session import Session

_REMEDY = (
    "return from the step what is to be kept, pass as an argument what differs from call to call, "
    "or change it in an actor's method that is marked @cg.opaque"
)
_DRAW_REMEDY = (
    "seed before the step; draw by torch functions called in the step itself, or pass what was "
    "drawn as an argument"
)
_TRAINER_REMEDY = "call it in an actor's method, which runs in every execution"


Record = Callable[[Session], None]
"""Runs the step's Python once, and records it into a session."""


def record_twice(
    record: Record, session: Session, fn: Callable[..., Any], name: str, loc: Location | None
) -> None:
    """Record a step, record it again, and compare the two.

    Args:
        record: records the step into a session.
        session: the session of the first run.
        fn: the step.
        name: the step's name, for messages.
        loc: where the step is defined.

    Raises:
        TraceError: the step changes something outside of itself, or does something else the second
            time. The state that it has changed is restored.
    """
    before = _Before(fn)
    check = _Check(record, session, name, loc, before)
    try:
        record(session)
        check.draws()
        check.leaks()
        check.trainers()
        middle = _Before(fn)
        second, failure = check.again()
        check.effects(middle.changes())
        if failure is not None and failure.__cause__ is not None:
            check.effects(before.changes())
        if failure is not None:
            raise failure
        check.same(second)
    except TraceError:
        before.restore()
        raise


class _Before:
    """The state that a step refers to, and the shared random generators, at one moment."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        reach = reach_all(fn, _instance_of)
        self._trainers = reach.trainers
        self._snapshot = reach.snapshot()
        self._generators = Snapshot(GENERATORS)

    def draws(self) -> list[StateChange]:
        """The shared random generators that have been drawn from, or seeded, since."""
        return self._generators.changes()

    def changes(self) -> list[StateChange]:
        """The other changes since."""
        changes = self._snapshot.changes()
        return [c for c in changes if not (isinstance(c.key, str) and c.key.startswith("__"))]

    def is_of_trainer(self, path: str) -> bool:
        """True if an optimizer, a scheduler or the like holds the state at a path."""
        return any(f"{path}.".startswith(f"{trainer}.") for trainer in self._trainers)

    def filled_caches(self) -> list[Any]:
        """The caches that hold new entries."""
        return self._snapshot.filled_caches()

    def restore(self) -> None:
        """Restore the state, and empty caches that have been filled."""
        self._snapshot.restore()
        self._generators.restore()


def _instance_of(value: Any) -> tuple[Any, ...] | None:
    if not isinstance(value, ActorHandle):
        return None
    return tuple(value.instances.values())


@dataclass(frozen=True)
class _Check:
    record: Record
    session: Session
    name: str
    loc: Location | None
    before: _Before

    def draws(self) -> None:
        """Refuse a step that draws from a shared random generator, or seeds it."""
        for moved in self.before.draws():
            loc, _ = self._find([moved])
            raise TraceError(
                f"step {self.name} seeded or drew from {moved.path} while it was traced, which "
                "would not happen again when it runs",
                loc=loc or self.loc,
                remedy=_DRAW_REMEDY,
            )

    def leaks(self) -> None:
        """Refuse a step that stores a traced value outside of itself."""
        for change in self.before.changes():
            if _holds_value(change.after):
                loc, _ = self._find([change])
                raise TraceError(
                    f"step {self.name} stores a value of its trace outside of itself, in "
                    f"'{change.path}'; it would stay there, and never become a tensor",
                    loc=loc or self.loc,
                    remedy="return the value from the step: what the step returns is real",
                )

    def trainers(self) -> None:
        """Refuse a step that changes an optimizer or a scheduler, even if both runs set the same.

        An example is a learning rate that is an argument: a call that reuses the trace would not
        set it.
        """
        changes = self.before.changes()
        self.effects([change for change in changes if self.before.is_of_trainer(change.path)])

    def again(self) -> tuple[Session, TraceError | None]:
        """The session of the second run, and the error that it raised, if any."""
        second, failure = self._once_more()
        caches = self.before.filled_caches() if isinstance(failure, StaleValue) else []
        if not caches:
            return second, failure
        # The caches keep values of the trace that filled them. Empty caches mislead no trace.
        for cache in caches:
            cache.cache_clear()
        try:
            return self._once_more()
        finally:
            for cache in caches:
                cache.cache_clear()

    def _once_more(self) -> tuple[Session, TraceError | None]:
        session = self.session.again()
        try:
            self.record(session)
        except TraceError as error:
            return session, error
        except Exception as error:
            return session, self._raised(error)
        return session, None

    def _raised(self, error: Exception) -> TraceError:
        failure = TraceError(
            f"step {self.name} is traced twice, and raised {type(error).__name__} the second time: "
            f"{error}. Its Python uses something up, or depends on what it has changed",
            loc=traceback_location(error.__traceback__) or self.loc,
            remedy=_REMEDY,
        )
        failure.__cause__ = error
        return failure

    def effects(self, changes: Sequence[StateChange]) -> None:
        """Refuse a step that makes these changes outside of itself."""
        if not changes:
            return
        loc, change = self._find(changes)
        if change is None:
            return  # no line of the step makes the change, so another thread does
        raise TraceError(
            f"step {self.name} changes '{change.path}' while it is traced, and "
            "would not when it runs: the Python of a step runs only in the trace",
            loc=loc,
            remedy=_TRAINER_REMEDY if self.before.is_of_trainer(change.path) else _REMEDY,
        )

    def same(self, second: Session) -> None:
        """Refuse a step whose second run records another program, or other constants or results."""
        first = self.session
        one, other = first.module.program, second.module.program
        difference = program_difference(one, other)
        loc = self.loc
        if difference is not None:
            loc = _first_difference(one, other) or loc
            raise different(self.name, difference, loc)
        for ref, constant in second.constants.items():
            if not same_bits(first.constants[ref], constant):
                constant_ops = (
                    op for op in other.ops if isinstance(op, Constant) and op.ref is not None
                )
                where = next(op.loc for op in constant_ops if op.ref == Symbol(ref))
                raise different(self.name, f"@{ref} has other elements", where or loc)
        for before, after in zip(first.results.leaves, second.results.leaves, strict=True):
            if before != after:
                how = f"it returns {_shown(before)}, then {_shown(after)}"
                raise different(self.name, how, loc)

    def _find(self, changes: Sequence[StateChange]) -> tuple[Location | None, StateChange | None]:
        """The line that makes one of the changes, and this change, found by a third run.

        Both are None if no line makes any.
        """
        self.before.restore()
        file = None if self.loc is None else self.loc.file
        finder = _LineFinder([(change, change.watch()) for change in changes], file)
        outer = sys.gettrace()
        sys.settrace(finder.enter)
        try:
            self.record(self.session.again())
        except Exception:
            pass
        finally:
            sys.settrace(outer)
        finder.look()
        return finder.line, finder.change


class _LineFinder:
    """Follows the lines of the user's code until one has made a change."""

    def __init__(
        self, watched: Sequence[tuple[StateChange, Callable[[], bool]]], file: str | None
    ) -> None:
        self.line: Location | None = None
        self.change: StateChange | None = None
        self._watched = watched
        self._file = file
        self._last: Location | None = None

    def enter(self, frame: FrameType, event: str, argument: object) -> Any:
        """The trace function for `sys.settrace`."""
        file = frame.f_code.co_filename
        is_followed = is_own_file(file) or file == self._file
        return self._step if self.change is None and is_followed else None

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        self.look()
        code = frame.f_code
        self._last = Location(code.co_filename, frame.f_lineno, code.co_name)
        return None if self.change is not None else self._step

    def look(self) -> None:
        """Blame the last line if one of the changes has been made now."""
        if self.change is None and self._last is not None:
            self.change = next((change for change, is_there in self._watched if is_there()), None)
            self.line = self._last


def _first_difference(one: Program, other: Program) -> Location | None:
    for a, b in zip(one.ops, other.ops, strict=False):
        if program_difference(Program("", ops=[a]), Program("", ops=[b])):
            return b.loc or a.loc
    return None


def _holds_value(value: Any) -> bool:
    items = list(value) if isinstance(value, (set, frozenset)) else value
    return any(isinstance(leaf, TracedTensor | ObjectValue) for leaf in tree_leaves(items))


def _shown(leaf: object) -> str:
    return repr(leaf.value) if isinstance(leaf, Static) else str(leaf)
