"""Find what a traced call changes outside of its actor: globals, closures, classes, defaults.

Such a change would happen once, while the call is traced, and what is left behind may be a fake. It
is taken back, and is an error that names what has changed; but what a function does in its first
call only, such as to fill a table of numbers, is done for good (`twice.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import CellType
from typing import Any

from ...ir.location import Location
from ..actors.actor_state import ActorState
from ..errors import TraceError
from ..heap.kinds import is_foreign
from ..heap.reach import has_fake, reach_near, reaches_tensor
from ..heap.snapshot import Change
from ..source import is_installed
from .changes import Initialization

_REMEDY = (
    "keep what changes in a buffer of the actor (self.register_buffer), which a traced method may "
    "update; or mark the method with @cg.opaque"
)


class SideEffects:
    """State outside of an actor that a function, and the actor's classes, refer to at one moment.

    Of a function of an installed package, only traced values that it leaves behind are noticed:
    nobody but its authors could change what else it does.

    Args:
        function: what is to be traced.
        state: the actor's state, which is looked after elsewhere.
    """

    def __init__(self, function: Callable[..., Any], state: ActorState) -> None:
        function = inspect.unwrap(getattr(function, "__func__", function))
        code = getattr(function, "__code__", None)
        self._strict = code is not None and not is_installed(code.co_filename)
        known = [container for container, _ in state.containers]
        classes = _own_classes(state)
        reach = (
            reach_near(function, known, classes)
            if self._strict
            else reach_near(function, known, classes, depth=0)
        )
        self._snapshot = reach.snapshot()

    def check(self, what: str, loc: Location | None) -> list[Initialization]:
        """Look for changes.

        Returns:
            Those that may be of the first call only.

        Raises:
            TraceError: there is another one.
        """
        changes = [change for change in self._snapshot.changes() if self._counts(change)]
        for change in changes:
            if has_fake(change.after):
                raise _stored(what, change.path, loc)
            if isinstance(change.holder, CellType) or reaches_tensor(change.after, set()):
                raise _lost(what, change, loc)
        return [Initialization(None, c, partial(_lost, what, c, loc)) for c in changes]

    def _counts(self, change: Change) -> bool:
        hidden = isinstance(change.key, str) and change.key.startswith("__")
        return has_fake(change.after) or (self._strict and not hidden)

    def undo(self) -> None:
        """Take every change back."""
        for change in self._snapshot.changes():
            if self._counts(change) or isinstance(change.holder, type):
                change.put(change.before)
        self._snapshot.clear_caches()


def _stored(what: str, path: str, loc: Location | None) -> TraceError:
    return TraceError(
        f"{what} cannot be traced: it stores a traced value outside the actor, in '{path}'",
        loc=loc,
        remedy="return the value, keep it in a buffer of the actor, or mark the method with "
        "@cg.opaque",
    )


def _lost(what: str, change: Change, loc: Location | None) -> TraceError:
    return TraceError(
        f"{what} cannot be traced: it changes '{change.path}', outside of the actor's attributes "
        f"({change.words()}); a traced method runs once, so the change would be lost",
        loc=loc,
        remedy=_REMEDY,
    )


def _own_classes(state: ActorState) -> list[type]:
    """The classes of an actor's objects that the user wrote."""
    classes = dict.fromkeys(cls for obj, _ in state.objects for cls in type(obj).__mro__)
    return [cls for cls in classes if not is_foreign(cls)]
