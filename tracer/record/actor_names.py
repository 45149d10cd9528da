"""The names by which a step's Python reaches actors, and whether they hold other actors now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from ..values.heap.variables import Variable, variables_of
from .actors.actors import ActorHandle

MANY = 1000
"""The longest container that is searched for actors; longer ones hold data."""
DEPTH = 3
"""The depth of nested containers that are searched."""


class ActorNames:
    """The actors that a step's names held when the step was traced.

    A name is a global variable, a closure variable or `self`, or an attribute that the step reads
    of one. It counts if it holds an actor, or a list, tuple or dict with actors.

    Args:
        fn: the step's function, or a bound method.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        named_actors = ((name, _actors(name.value(), DEPTH)) for name in variables_of(fn))
        self._held = [_NamedActors(name, actors) for name, actors in named_actors if actors]

    def moved(self) -> str | None:
        """A name that now holds other actors than at the trace, or in another order; None if none.

        It is called before each call of a compiled step.
        """
        moved = next(filter(_NamedActors.has_moved, self._held), None)
        return None if moved is None else moved.name.path


@dataclass(frozen=True)
class _NamedActors:
    """The actors that a name held."""

    name: Variable
    actors: Sequence[ActorHandle]

    def has_moved(self) -> bool:
        now, then = self.name.value(), self.actors
        if type(now) is list and len(now) == len(then) and all(map(is_, now, then)):
            return False  # the usual case, and a fast check
        actors = (now,) if type(now) is ActorHandle else _actors(now, DEPTH)
        return len(actors) != len(then) or not all(map(is_, actors, then))


def _actors(value: Any, depth: int) -> Sequence[ActorHandle]:
    """The actors in a value: the value itself, or those in nested containers."""
    if type(value) is ActorHandle:
        return (value,)
    if not depth or not isinstance(value, (list, tuple, dict)) or len(value) > MANY:
        return ()
    items = value.values() if isinstance(value, dict) else value
    return tuple(actor for item in items for actor in _actors(item, depth - 1))
