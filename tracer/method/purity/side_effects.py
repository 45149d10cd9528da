"""Find what a traced call changes outside of its actor: globals, closures, classes, defaults.

Such a change would happen once, while the call is traced, and might leave a fake behind. It is
undone, and the error names what has changed. A change that only the first call makes, such as
filling a table of numbers, stays (`twice.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import CellType, ModuleType
from typing import Any

from ...errors import TraceError
from ...source import is_installed
from ...values.actor_state import ActorState
from ...values.heap.kinds import is_foreign
from ...values.heap.reach import NEAR, Reach, has_fake, reach_near, reaches_tensor
from ...values.heap.snapshot import StateChange
from ...values.interface import TracedCall
from .changes import Initialization

_REMEDY = (
    "keep what changes in a buffer of the actor (self.register_buffer), which a traced method may "
    "update; or mark the method with @cg.opaque"
)


class SideEffects:
    """A snapshot of the state outside an actor that a function and the actor's classes refer to.

    For a function of an installed package, only traced values that it leaves behind count: only
    its authors could change what else it does.

    Args:
        function: the function to trace.
        state: the actor's state, which is checked elsewhere.
    """

    def __init__(self, function: Callable[..., Any], state: ActorState) -> None:
        function = inspect.unwrap(getattr(function, "__func__", function))
        code = getattr(function, "__code__", None)
        self._strict = code is not None and not is_installed(code.co_filename)
        known = [container for container, _ in state.containers]
        classes = _own_classes(state)
        depth = NEAR if self._strict else 0
        self._snapshot = reach_near(function, known, classes, depth).snapshot()

    def check(self, call: TracedCall) -> list[Initialization]:
        """Look for changes that a call has made.

        Returns:
            The changes that perhaps only the first call makes.

        Raises:
            TraceError: there is any other change.
        """
        changes = self._changes()
        for change in changes:
            if has_fake(change.after):
                raise call.refusal(
                    f"it stores a traced value outside the actor, in '{change.path}'",
                    "return the value, keep it in a buffer of the actor, or mark the method with "
                    "@cg.opaque",
                )
            if isinstance(change.holder, CellType) or reaches_tensor(change.after, set()):
                raise _lost(call, change)
        return [Initialization(None, c, partial(_lost, call, c)) for c in changes]

    def changed_places(self) -> set[tuple[int, Any]]:
        """The places that have changed so far: the ids of holders, and their keys."""
        return {(id(change.holder), change.key) for change in self._changes()}

    def _changes(self) -> list[StateChange]:
        return [change for change in self._snapshot.changes() if self._counts(change)]

    def _counts(self, change: StateChange) -> bool:
        hidden = isinstance(change.key, str) and change.key.startswith("__")
        return has_fake(change.after) or (self._strict and not hidden)

    def undo(self) -> None:
        """Undo every change."""
        for change in self._snapshot.changes():
            if self._counts(change) or isinstance(change.holder, type):
                change.put(change.before)
        self._snapshot.clear_caches()


class UsersModules:
    """A snapshot of the globals of all modules of the user, for calls that are left in their midst.

    Lines that empty a list again, or set a variable back, do not run then. A module that a call has
    imported stays.

    Args:
        modules: what `reach_modules` gives, or nothing.
    """

    def __init__(self, modules: Reach) -> None:
        self._snapshot = modules.snapshot()

    def changes(self) -> list[StateChange]:
        """The changes since then."""
        changes = self._snapshot.changes()
        return [change for change in changes if not isinstance(change.after, ModuleType)]

    def undo(self) -> None:
        """Undo these changes."""
        for change in self.changes():
            change.put(change.before)


def _lost(call: TracedCall, change: StateChange) -> TraceError:
    return call.refusal(
        f"it changes '{change.path}', outside of the actor's attributes ({change.words()}); a "
        "traced method runs once, so the change would be lost",
        _REMEDY,
    )


def _own_classes(state: ActorState) -> list[type]:
    """The classes of an actor's objects that the user wrote."""
    classes = dict.fromkeys(cls for obj, _ in state.objects for cls in type(obj).__mro__)
    return [cls for cls in classes if not is_foreign(cls)]
