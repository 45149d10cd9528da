"""The names by which a step's Python reaches actors, and whether they stand for others now."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ..actors.actors import ActorHandle


class ActorNames:
    """What a step's global variables, closure and object held when it was traced.

    Only names that hold actors, or lists, tuples and dictionaries of nothing else: those of the
    function itself, and attributes that it reads of objects that these names hold.

    Args:
        fn: the step's function, or a bound method.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        found = ((name, name.value()) for name in _names(fn))
        self._held = [
            _Held(name, type(value), actors) for name, value in found if (actors := _actors(value))
        ]

    def have_moved(self) -> bool:
        """True if one of them holds other actors than then, or in another order."""
        return any(map(_Held.has_moved, self._held))


@dataclass(frozen=True)
class _Name:
    """A variable, or an attribute of the object that it holds.

    Attributes:
        space: the cell of a variable of a function, or the dictionary of a module.
        name: in the dictionary.
        attribute: None for the variable itself.
    """

    space: CellType | dict[str, Any]
    name: str = ""
    attribute: str | None = None

    def value(self) -> Any:
        """What it holds now; None if it is not there."""
        try:
            space = self.space
            held = space.cell_contents if isinstance(space, CellType) else space[self.name]
            return held if self.attribute is None else vars(held)[self.attribute]
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True)
class _Held:
    """What a name held: an actor, or actors in a container of a kind."""

    name: _Name
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


def _names(fn: Callable[..., Any]) -> Iterator[_Name]:
    """The variables that a function reads, and the attributes that it may read of each."""
    roots: list[_Name] = []
    if isinstance(fn, MethodType):
        roots.append(_Name(CellType(fn.__self__)))
        fn = fn.__func__
    fn = inspect.unwrap(fn)
    if not isinstance(fn, FunctionType):
        return
    read = set(_read(fn.__code__))
    roots += [_Name(fn.__globals__, name) for name in sorted(read & fn.__globals__.keys())]
    roots += [_Name(cell) for cell in fn.__closure__ or ()]
    for root in roots:
        yield root
        value = root.value()
        if isinstance(value, (type, ModuleType, ActorHandle)):
            continue
        try:
            attributes = read & vars(value).keys()
        except TypeError:  # it has none
            continue
        yield from (replace(root, attribute=each) for each in sorted(attributes))


def _read(code: CodeType) -> Iterator[str]:
    """The names of variables and of attributes that a function reads, and those within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _read(constant)
