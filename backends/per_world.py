"""Tables of things that a process has once for each world, as its transport to other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, cast
from weakref import WeakKeyDictionary

from .base import World

T = TypeVar("T")


class Entry(Generic[T]):
    """The entry of a world in a table, for those who look at its thing often: they hold the entry.

    Attributes:
        thing: the thing; None if it has not been made.
    """

    __slots__ = ("is_made", "thing")

    def __init__(self) -> None:
        self.thing: T | None = None
        self.is_made = False


class PerWorld(Generic[T]):
    """One thing for each world, made when it is first asked for, and dropped with the world."""

    def __init__(self) -> None:
        self._entries: WeakKeyDictionary[World, Entry[T]] = WeakKeyDictionary()

    def of(self, world: World, make: Callable[[], T]) -> T:
        """The thing of a world. If `make` is collective, so is the first call."""
        entry = self.entry(world)
        if not entry.is_made:
            entry.thing = make()
            entry.is_made = True
        return cast(T, entry.thing)  # None only where T has it

    def get(self, world: World) -> T | None:
        """The thing of a world; None if it has not been made."""
        return self.entry(world).thing

    def entry(self, world: World) -> Entry[T]:
        """The entry of a world, whose thing may be made later."""
        return self._entries.setdefault(world, Entry())
