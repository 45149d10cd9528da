"""A value that is made when something asks for it first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Lazy(Generic[T]):
    """A value that `make` gives when it is asked for first. It is equal to itself alone."""

    __slots__ = ("_make", "_value")

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._value: T

    @staticmethod
    def known(value: T) -> Lazy[T]:
        """A value that is there."""
        return Lazy(lambda: value)

    @property
    def value(self) -> T:
        """The value."""
        if self._make is not None:
            self._value, self._make = self._make(), None
        return self._value
