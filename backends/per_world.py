"""Tables of things that a process has once for each world, as its transport to other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from .base import World

T = TypeVar("T")


class PerWorld(Generic[T]):
    """One thing for each world, made when it is first asked for, and dropped with the world."""

    def __init__(self) -> None:
        self._things: WeakKeyDictionary[World, T] = WeakKeyDictionary()

    def of(self, world: World, make: Callable[[], T]) -> T:
        """The thing of a world. If `make` is collective, so is the first call."""
        if world not in self._things:
            self._things[world] = make()
        return self._things[world]

    def get(self, world: World) -> T | None:
        """The thing of a world; None if it has not been made."""
        return self._things.get(world)
