"""Watch an actor's attributes while a call is traced: what is read, what is written, where.

The class of every object notes each access for the time of the trace. So a guard covers exactly the
attributes that the trace relied on, and an attribute that a traced method sets is reported with its
line. Touching an optimizer ends the trace at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ....ir.location import Location
from ...error_translation import current_location
from ...errors import TraceError
from ...source import is_installed, is_torch_file
from ...values.actor_state import ActorState
from ...values.heap.kinds import is_used_up
from ...values.heap.snapshot import MISSING

EVERYTHING = "__dict__"
"""Noted as read where code looks at all attributes at once (`vars(self)`)."""


class UsesGradients(BaseException):
    """Ends a trace: the call works on gradients, so it must be called and not traced.

    Not an `Exception`, so that no handler in the user's code takes it for a failure.
    """


class AttributeWatch:
    """Notes accesses to the attributes of an actor's objects, inside a `with` block.

    The classes of the objects get methods that take notes, so the objects keep their classes.
    Accesses to other objects of these classes are not noted.

    Attributes:
        reads: for the `id` of each object, the names that were read.
        writes: the line of the last write of each (object id, name).
        by_library: those whose last write is in the code of an installed package.
    """

    def __init__(self, state: ActorState) -> None:
        self.reads: dict[int, set[str]] = {}
        self.writes: dict[tuple[int, str], Location | None] = {}
        self.by_library: set[tuple[int, str]] = set()
        self._state = state
        self._trainers = {id(trainer) for trainer in state.trainers}
        self._patched: list[tuple[type, str, Any]] = []
        self._lasting: set[type] = set()  # types of values that are not used up

    def __enter__(self) -> AttributeWatch:
        self.reads.update((id(obj), set()) for obj, _ in self._state.objects)
        classes = {type(obj): self._noting for obj, _ in self._state.objects}
        classes |= {type(trainer): self._forbidding for trainer in self._state.trainers}
        # Make all new methods before replacing any: they call the original ones.
        spaces = [(cls, make(cls)) for cls, make in classes.items()]
        try:
            refusing = {cls for cls, space in spaces if not self._patch(cls, space)}
        except BaseException:
            self.restore()
            raise
        for obj, _ in self._state.objects:
            if type(obj) in refusing:
                self.reads[id(obj)].add(EVERYTHING)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.restore()

    def _patch(self, cls: type, space: dict[str, Any]) -> bool:
        """Give a class these methods; False if it does not take them."""
        for name, method in space.items():
            self._patched.append((cls, name, vars(cls).get(name, MISSING)))  # first, for Ctrl-C
            try:
                type.__setattr__(cls, name, method)
            except TypeError:  # a class that is not written in Python
                self._patched.pop()
                return False
        return True

    def restore(self) -> None:
        """Give all classes their own methods again; may be called twice."""
        while self._patched:
            cls, name, before = self._patched[-1]
            if before is not MISSING:
                type.__setattr__(cls, name, before)
            elif name in vars(cls):
                type.__delattr__(cls, name)
            self._patched.pop()

    def _noting(self, cls: type) -> dict[str, Any]:
        reads, writes, by_library = self.reads, self.writes, self.by_library
        lasting = self._lasting
        # Taken from the class, so they are plain functions of (object, name, ...).
        get: Callable[..., Any] = cls.__getattribute__

        def get_attribute(self: Any, name: str) -> Any:
            names = reads.get(id(self))
            if names is None:  # another object, or a copy that the method has made
                return get(self, name)
            if name == EVERYTHING:
                if not is_torch_file(sys._getframe(1).f_code.co_filename):
                    names.add(name)
            elif not name.startswith("__"):
                names.add(name)
            value = get(self, name)
            if type(value) not in lasting:
                if is_used_up(value):
                    raise _using_up(cls, name, value)
                if value.__class__ is type(value):  # not a proxy, which is like its referent
                    lasting.add(type(value))
            return value

        def noting(change: Callable[..., None]) -> Callable[..., None]:
            def changed(self: Any, name: str, *value: Any) -> None:
                if id(self) in reads:
                    writes[id(self), name] = current_location()[0]
                    by_library.discard((id(self), name))
                    if is_installed(sys._getframe(1).f_code.co_filename):
                        by_library.add((id(self), name))
                change(self, name, *value)

            return changed

        return {
            "__getattribute__": get_attribute,
            "__setattr__": noting(cls.__setattr__),
            "__delattr__": noting(cls.__delattr__),
        }

    def _forbidding(self, cls: type) -> dict[str, Any]:
        trainers = self._trainers
        get: Callable[..., Any] = cls.__getattribute__
        put: Callable[..., None] = cls.__setattr__

        def get_attribute(self: Any, name: str) -> Any:
            if id(self) in trainers and name != "__class__":
                raise UsesGradients(f"it uses {cls.__name__}.{name}")
            return get(self, name)

        def set_attribute(self: Any, name: str, value: Any) -> None:
            if id(self) in trainers:
                raise UsesGradients(f"it sets {cls.__name__}.{name}")
            put(self, name, value)

        return {"__getattribute__": get_attribute, "__setattr__": set_attribute}


def _using_up(cls: type, name: str, value: Any) -> TraceError:
    loc, note = current_location()
    return TraceError(
        f"{cls.__qualname__}.{name} is a {type(value).__name__}, which changes when it is used; a "
        f"traced method runs once, so every execution would get what the first one got{note}",
        loc=loc,
        remedy="mark the method with @cg.opaque, or hand its items to the method as arguments",
    )
