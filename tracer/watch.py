"""Watching an actor's attributes while a call is traced: what is read, what is written, where.

The class of every object is replaced, for the time of the trace, by a subclass that notes each
access. So a guard covers exactly the attributes that the trace relied on, and an attribute that a
traced method sets is reported with its line. Touching an optimizer ends the trace at once.
"""

from __future__ import annotations

import abc
import os
import sys
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any, NoReturn

import torch

from ..ir.location import Location
from .blame import current_location
from .contents import is_used_up
from .errors import TraceError
from .lifting import ActorState

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

EVERYTHING = "__dict__"
"""Noted as read where code looks at all attributes at once (`vars(self)`)."""


class RunAsIs(BaseException):
    """Ends a trace: the call works on gradients, so it is to be called as it is.

    Not an `Exception`, so that no handler in the user's code takes it for a failure.
    """


class Watch:
    """Notes accesses to the attributes of an actor's objects, inside a `with` block.

    Attributes:
        reads: for the `id` of each object, the names that were read.
        writes: the line of the last write of each (object id, name).
    """

    def __init__(self, state: ActorState, until: CodeType) -> None:
        self.reads: dict[int, set[str]] = {}
        self.writes: dict[tuple[int, str], Location | None] = {}
        self._state = state
        self._until = until
        self._classes: dict[tuple[type, bool], type | None] = {}
        self._made: dict[type, frozenset[str]] = {}
        self._swapped: list[tuple[Any, type]] = []

    def __enter__(self) -> Watch:
        for obj, _ in self._state.objects:
            self.reads[id(obj)] = set()
            if not self._swap(obj, trainer=False):
                self.reads[id(obj)].add(EVERYTHING)
        for trainer in self._state.trainers:
            self._swap(trainer, trainer=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Give all objects their own classes again; can be done twice."""
        while self._swapped:
            obj, cls = self._swapped[-1]
            object.__setattr__(obj, "__class__", cls)
            self._swapped.pop()

    def _swap(self, obj: Any, *, trainer: bool) -> bool:
        cls = type(obj)
        key = (cls, trainer)
        if key not in self._classes:
            space = self._forbidding(cls) if trainer else self._noting(cls)
            made = self._classes[key] = _subclass(cls, space)
            if made is not None:
                self._made[made] = frozenset(vars(made))
        watched = self._classes[key]
        if watched is None:
            return False
        self._swapped.append((obj, cls))  # first: Ctrl-C may come between the two
        try:
            object.__setattr__(obj, "__class__", watched)
        except TypeError:
            self._swapped.pop()
            return False
        return True

    def class_writes(self) -> list[str]:
        """Attributes that were set on the classes that stood in, as by `type(self).count += 1`."""
        return [
            f"{cls.__name__}.{name}"
            for cls, before in self._made.items()
            for name in vars(cls).keys() - before
            if not name.startswith("__")
        ]

    def _noting(self, cls: type) -> dict[str, Any]:
        reads, writes, until = self.reads, self.writes, self._until
        # Taken from the class, so they are plain functions of (object, name, ...).
        get: Callable[..., Any] = cls.__getattribute__
        put: Callable[..., None] = cls.__setattr__
        drop: Callable[..., None] = cls.__delattr__

        def get_attribute(self: Any, name: str) -> Any:
            if name == "__class__":
                return cls
            if name != EVERYTHING or not _called_by_torch():
                names = reads.get(id(self))
                if names is not None:  # None: a copy that the method has made
                    names.add(name)
            value = get(self, name)
            if is_used_up(value):
                raise _using_up(cls, name, value, until)
            return value

        def set_attribute(self: Any, name: str, value: Any) -> None:
            writes[id(self), name] = current_location(until)[0]
            put(self, name, value)

        def delete_attribute(self: Any, name: str) -> None:
            writes[id(self), name] = current_location(until)[0]
            drop(self, name)

        return {
            "__getattribute__": get_attribute,
            "__setattr__": set_attribute,
            "__delattr__": delete_attribute,
        }

    def _forbidding(self, cls: type) -> dict[str, Any]:
        def get_attribute(self: Any, name: str) -> Any:
            if name == "__class__":
                return cls
            raise RunAsIs(f"it uses {cls.__name__}.{name}")

        def set_attribute(self: Any, name: str, value: Any) -> NoReturn:
            raise RunAsIs(f"it sets {cls.__name__}.{name}")

        return {"__getattribute__": get_attribute, "__setattr__": set_attribute}


def _using_up(cls: type, name: str, value: Any, until: CodeType) -> TraceError:
    loc, note = current_location(until)
    return TraceError(
        f"{cls.__qualname__}.{name} is a {type(value).__name__}, which changes when it is used; a "
        f"traced method runs once, so every execution would get what the first one got{note}",
        loc=loc,
        remedy="mark the method with @cg.opaque, or hand its items to the method as arguments",
    )


def _called_by_torch() -> bool:
    return sys._getframe(2).f_code.co_filename.startswith(_TORCH)


class _NoSubclassHook:
    def __init_subclass__(cls, **_: Any) -> None:
        """Keeps the watched class's own hook (registries and the like) from running."""


def _subclass(cls: type, space: dict[str, Any]) -> type | None:
    """A subclass to swap in, or None where the class does not admit one."""
    if type(cls) not in (type, abc.ABCMeta):
        return None
    space = {**space, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    hooked = any("__init_subclass__" in vars(base) for base in cls.__mro__[:-1])
    try:
        if hooked:
            return type(cls)(cls.__name__, (_NoSubclassHook, cls), space)
        return type(cls)(cls.__name__, (cls,), {**space, "__slots__": ()})
    except TypeError:
        return None
