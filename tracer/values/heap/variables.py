"""The variables that a function reads: global ones, those of functions around it, attributes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import compress
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ...source import is_own_file

DEPTH = 3
"""How many attributes deep a variable is followed."""


@dataclass(frozen=True)
class Variable:
    """A variable, or an attribute of the object that it holds.

    Attributes:
        name: the name of the variable.
        space: the cell of a variable of a function, or the dictionary of a module.
        attributes: from the variable's object to the attribute; none for the variable itself.
    """

    name: str
    space: CellType | dict[str, Any]
    attributes: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The name with the attributes behind it, such as `self.stages`."""
        return ".".join((self.name, *self.attributes))

    def value(self) -> Any:
        """Its value now; None if it is not there."""
        try:
            space = self.space
            held = space.cell_contents if isinstance(space, CellType) else space[self.name]
            for attribute in self.attributes:
                held = vars(held)[attribute]
            return held
        except (KeyError, TypeError, ValueError):
            return None


def variables_of(fn: Callable[..., Any]) -> Iterator[Variable]:
    """The variables that a function reads, and the attributes that it may read of each.

    Variables of other functions, which it calls, are not among them.

    Args:
        fn: a function, a bound method (whose object counts as a variable, `self`), or a wrapper of
            one; anything else reads nothing.
    """
    roots: list[Variable] = []
    if isinstance(fn, MethodType):
        roots.append(Variable("self", CellType(fn.__self__)))
        fn = fn.__func__
    fn = inspect.unwrap(fn)
    if not isinstance(fn, FunctionType):
        return
    read = set(names_of(fn.__code__))
    roots += [Variable(name, fn.__globals__) for name in sorted(read & fn.__globals__.keys())]
    roots += [Variable(name, cell) for name, cell in closure_of(fn)]
    for root in roots:
        yield from _with_attributes(root, read)


def _with_attributes(variable: Variable, read: Set[str]) -> Iterator[Variable]:
    """A variable, and the attributes below it that have some names."""
    yield variable
    value = variable.value()
    if len(variable.attributes) == DEPTH or isinstance(value, type):
        return
    if isinstance(value, ModuleType) and not is_users(value):
        return
    try:
        attributes = read & vars(value).keys()
    except TypeError:  # it has none
        return
    for attribute in sorted(attributes):
        yield from _with_attributes(
            replace(variable, attributes=(*variable.attributes, attribute)), read
        )


def names_of(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in a function's code, and in functions in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_of(constant)


def closure_of(function: Any) -> list[tuple[str, CellType]]:
    """The variables that a function takes from functions around it, with their cells.

    Anything but a function has none.
    """
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return list(zip(names, getattr(function, "__closure__", None) or (), strict=False))


def is_users(module: ModuleType) -> bool:
    """True if a module is the user's own, and not of an installed package."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_own_file(file)


class _SearchedModules:
    """The user's modules; of those that are loaded later, the new ones alone are looked at.

    A process that has imported torch has thousands of modules. Looking up the file of each in every
    trace takes a tenth of the time of tracing.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._all: list[ModuleType] = []
        self._users: list[bool] = []

    def __call__(self) -> list[ModuleType]:
        """The modules that are the user's own, and that whose name is `__main__`."""
        names, values = list(sys.modules), list(sys.modules.values())
        known = len(self._names)
        if names[:known] != self._names or not all(map(is_, values, self._all)):
            self._users, known = [], 0
        if len(names) > known:
            self._users += _are_users_or_main(names[known:], values[known:])
        self._names, self._all = names, values
        return list(compress(values, self._users))


def _are_users_or_main(names: Sequence[str], values: Sequence[Any]) -> list[bool]:
    """For each loaded module, whether it is the user's own, or its name is `__main__`.

    Nearly all are of installed packages, which takes no call to see.
    """
    files = [
        getattr(value, "__file__", None) if isinstance(value, ModuleType) else None
        for value in values
    ]
    own = [
        isinstance(file, str) and "site-packages" not in file and is_own_file(file)
        for file in files
    ]
    if "__main__" in names:
        main = names.index("__main__")
        own[main] = isinstance(values[main], ModuleType)
    return own


users_modules = _SearchedModules()
