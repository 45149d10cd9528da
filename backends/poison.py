"""Errors as data, which take the place of values that could not be made.

A poison stands in registers and travels in messages like the value that it replaces. In the end
the user catches an exception that is both a `RemoteError` and of the original's class.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Mapping
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any
from weakref import WeakKeyDictionary

from .errors import Failure, RemoteError

_NOT_MIXED = (StopIteration, StopAsyncIteration, asyncio.CancelledError, GeneratorExit, RemoteError)
"""Errors that mean something to the interpreter or to asyncio when raised, and our own."""

_NOT_FIELDS = {"args", "obj"}


class Poison(Exception):
    """An error in place of a value. Raised where the value would be taken.

    Attributes:
        failure: what has happened, as plain data.
        original: the exception itself, where it was raised; elsewhere None.
    """

    def __init__(
        self, failure: Failure, original: BaseException | None = None, pickled: bytes | None = None
    ) -> None:
        super().__init__(failure, original, pickled)
        self.failure = failure
        self.original = original
        self._pickled = pickled

    def to_bytes(self) -> bytes:
        """The poison as bytes of a message; an exception that cannot be pickled is left out."""
        if self._pickled is None and self.original is not None:
            self._pickled = _packed(self.original)
        return pickle.dumps((self.failure, self._pickled), 5)

    @staticmethod
    def from_bytes(content: bytes | memoryview) -> Poison:
        """The poison of a message."""
        failure, pickled = pickle.loads(content)
        return Poison(failure, None, pickled)

    def error(self) -> RemoteError:
        """The error that the caller sees.

        It is an instance of both `RemoteError` and the original exception's class, with the
        original's arguments and attributes; the original is its `__cause__`. It is a plain
        `RemoteError`, which only names the original, if the original is no `Exception`, has not
        come to this rank, or has a class that cannot be combined.
        """
        original = self.original
        if original is None and self._pickled:
            original = _unpacked(self._pickled)
        if original is None:
            return RemoteError(self.failure)
        if isinstance(original, RemoteError):
            return original
        error = _mixed(self.failure, original)
        error.__cause__ = original
        return error


def _packed(error: BaseException) -> bytes:
    """An exception as bytes; empty if it cannot be pickled.

    Python's own pickle calls the class with `args` again, which many users' classes do not take.
    """
    cls = type(error)
    whole: Any = error
    if cls.__reduce__ is BaseException.__reduce__:
        whole = (cls, error.args, _portable(error.__dict__), _portable(_fields(error)))
    try:
        return pickle.dumps(whole, 5)
    except Exception:  # whatever a user's class does when it is pickled
        return b""


def _fields(error: BaseException) -> dict[str, Any]:
    """The fields of an exception outside of `__dict__`: in slots, or built into the interpreter.

    An AttributeError's object, which may be anything, is left out.
    """
    kinds = (MemberDescriptorType, GetSetDescriptorType)
    fields: dict[str, Any] = {}
    for cls in type(error).__mro__:
        for name, descriptor in vars(cls).items():
            if isinstance(descriptor, kinds) and name not in _NOT_FIELDS and name[:2] != "__":
                value = getattr(error, name, None)
                if value is not None:
                    fields.setdefault(name, value)
    return fields


def _set_fields(error: BaseException, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        with contextlib.suppress(AttributeError, TypeError):  # a field that can only be read
            setattr(error, name, value)


def _portable(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that can be pickled."""
    portable = {}
    for name, value in attributes.items():
        with contextlib.suppress(Exception):  # whatever a user's class does when it is pickled
            pickle.dumps(value, 5)
            portable[name] = value
    return portable


def _unpacked(content: bytes) -> BaseException | None:
    try:
        whole = pickle.loads(content)
        if isinstance(whole, BaseException):
            return whole
        cls, args, attributes, fields = whole
        error: BaseException = cls.__new__(cls, *args)
        error.args = args
        error.__dict__.update(attributes)
        _set_fields(error, fields)
    except Exception:  # its class does not exist here, or is another one
        return None
    return error


_classes: WeakKeyDictionary[type[BaseException], type[RemoteError]] = WeakKeyDictionary()


def _mixed(failure: Failure, original: BaseException) -> RemoteError:
    cls = type(original)
    known = issubclass(RemoteError, cls)
    if known or issubclass(cls, _NOT_MIXED) or not issubclass(cls, Exception):
        return RemoteError(failure)
    try:
        error = _class_for(cls)(failure)
        _builtin_base(cls).__init__(error, *original.args)
        error.args = original.args
        error.__dict__.update(original.__dict__)
        _set_fields(error, _fields(original))
        error.failure = failure
    except Exception:  # a metaclass, slots, or a base that cannot be combined
        return RemoteError(failure)
    return error


def _class_for(cls: type[BaseException]) -> type[RemoteError]:
    error_class = _classes.get(cls)
    if error_class is None:
        name = f"RemoteError({cls.__qualname__})"
        space: dict[str, Any] = {
            "__module__": RemoteError.__module__,
            "__doc__": RemoteError.__doc__,
            "__str__": lambda self: self.failure.describe(),
            "__reduce__": lambda self: (_rebuilt, (self.failure, _packed(self.__cause__))),
        }
        error_class = _classes[cls] = type(name, (RemoteError, cls), space)
    return error_class


def _builtin_base(cls: type[BaseException]) -> Any:
    return next(base for base in cls.__mro__ if base.__module__ == "builtins")


def _rebuilt(failure: Failure, original: bytes) -> RemoteError:
    return Poison(failure, None, original).error()
