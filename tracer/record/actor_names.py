"""The names by which a step's Python reaches actors, and whether they stand for others now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from ..values.heap.variables import Variable, variables_of
from .actors.actors import ActorHandle

MANY = 1000
"""Items of a container in which actors are looked for; longer ones hold data."""
DEPTH = 3
"""Containers in containers that are looked into."""


class ActorNames:
    """What a step's global variables, closure and object held when it was traced.

    These are the names of the function itself, and attributes that it reads of objects that they
    hold. Each holds an actor, or a list, tuple or dict with some.

    Args:
        fn: the step's function, or a bound method.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        named_actors = ((name, _actors(name.value(), DEPTH)) for name in variables_of(fn))
        self._held = [_Held(name, actors) for name, actors in named_actors if actors]

    def have_moved(self) -> bool:
        """True if one of them holds other actors than then, or in another order."""
        return any(map(_Held.has_moved, self._held))


@dataclass(frozen=True)
class _Held:
    """The actors that a name held."""

    name: Variable
    actors: Sequence[ActorHandle]

    def has_moved(self) -> bool:
        now, then = self.name.value(), self.actors
        if type(now) is list and len(now) == len(then) and all(map(is_, now, then)):
            return False  # as mostly, and in less time
        actors = (now,) if type(now) is ActorHandle else _actors(now, DEPTH)
        return len(actors) != len(then) or not all(map(is_, actors, then))


def _actors(value: Any, depth: int) -> Sequence[ActorHandle]:
    """The actor that a value is, or those in a container and in containers in it."""
    if type(value) is ActorHandle:
        return (value,)
    if not depth or not isinstance(value, (list, tuple, dict)) or len(value) > MANY:
        return ()
    items = value.values() if isinstance(value, dict) else value
    return tuple(actor for item in items for actor in _actors(item, depth - 1))
