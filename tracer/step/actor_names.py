"""The names by which a step's Python reaches actors, and whether they stand for others now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from ..actors.actors import ActorHandle
from ..heap.variables import Variable, variables_of


class ActorNames:
    """What a step's global variables, closure and object held when it was traced.

    Only names that hold actors, or lists, tuples and dictionaries of nothing else: those of the
    function itself, and attributes that it reads of objects that these names hold.

    Args:
        fn: the step's function, or a bound method.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        found = ((name, name.value()) for name in variables_of(fn))
        self._held = [
            _Held(name, type(value), actors) for name, value in found if (actors := _actors(value))
        ]

    def have_moved(self) -> bool:
        """True if one of them holds other actors than then, or in another order."""
        return any(map(_Held.has_moved, self._held))


@dataclass(frozen=True)
class _Held:
    """What a name held: an actor, or actors in a container of a kind."""

    name: Variable
    kind: type[Any]
    actors: Sequence[ActorHandle]

    def has_moved(self) -> bool:
        now = self.name.value()
        if type(now) is not self.kind:
            return True
        if self.kind is ActorHandle:
            return now is not self.actors[0]
        held = now.values() if isinstance(now, dict) else now
        return len(held) != len(self.actors) or not all(map(is_, held, self.actors))


def _actors(value: Any) -> Sequence[ActorHandle]:
    """The actor that a value is, or those in a container of nothing else."""
    if type(value) is ActorHandle:
        return (value,)
    if not isinstance(value, (list, tuple, dict)):
        return ()
    held = tuple(value.values() if isinstance(value, dict) else value)
    return held if all(type(each) is ActorHandle for each in held) else ()
