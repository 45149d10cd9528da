"""Walk what a function's Python refers to: variables, classes, containers and objects, with paths.

`reach_all` follows functions, classes and modules that the user wrote as far as they go: a step's
Python is a few lines. `reach_near` looks three containers deep at what a method's code names, since
a method may use a library. Nothing is kept alive for long.
"""

from __future__ import annotations

import collections
import enum
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...source import is_own_file
from .kinds import (
    CONTAINERS,
    SCALARS,
    TRAINERS,
    has_slots,
    is_cache,
    is_foreign,
    is_plain,
    is_stateful,
    is_walked,
    items_of,
    join,
    slots_of,
)
from .snapshot import MISSING, ModuleNames, Snapshot, read_cell
from .variables import closure_of, is_users, names_of

NEAR = 3
"""How many containers deep `reach_near` looks."""
_FEW = 1000
"""The most items of a container that `reach_near` takes."""
_MANY = 10_000
"""The most items of a container that `reach_all` walks; the most containers of `reach_near`."""
_LARGE = 100_000
"""The most items of a container that `reach_all` takes."""


@dataclass(eq=False, slots=True)
class Reach:
    """State that a function refers to, and that can change.

    Attributes:
        variables: variables of closures, names of modules and classes, with their paths.
        containers: containers and attributes of objects, with their paths.
        others: arrays, generators and objects with slots, with their paths.
        caches: functions that remember results.
        trainers: the paths of optimizers, schedulers and the like.
    """

    variables: list[tuple[Any, str]] = field(default_factory=list)
    containers: list[tuple[Any, str]] = field(default_factory=list)
    others: list[tuple[Any, str]] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)
    trainers: list[str] = field(default_factory=list)

    def snapshot(self) -> Snapshot:
        """Copy what all of it holds now."""
        return Snapshot((*self.variables, *self.containers, *self.others), self.caches)


def reach_all(
    function: Callable[..., Any], instance_of: Callable[[Any], tuple[Any, ...] | None]
) -> Reach:
    """Walk everything that a function refers to and that the user wrote.

    Installed packages are left out: only their authors know what they change, and why.

    Args:
        function: where the walk begins.
        instance_of: gives the actor of a handle in a tuple, which is empty where another process
            holds the actor; None for anything but a handle. Actors are walked only if some code
            uses `.local`.
    """
    return _Walk(instance_of).run(function)


class _Walk:
    """The walk of `reach_all`."""

    def __init__(self, instance_of: Callable[[Any], tuple[Any, ...] | None]) -> None:
        self._reach = Reach()
        self._seen: set[int] = set()
        self._instance_of = instance_of
        self._asks_for_instances = False
        self._instances: list[tuple[Any, str]] = []

    def run(self, function: Callable[..., Any]) -> Reach:
        self._visit(function, getattr(function, "__name__", "the step"))
        while self._asks_for_instances and self._instances:
            instance, path = self._instances.pop()
            self._visit(instance, f"{path}.local")
        return self._reach

    def _visit(self, value: Any, path: str) -> None:
        if is_plain(value) or isinstance(value, (torch.Tensor, weakref.ref)):
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, MethodType):
            self._visit(value.__func__, path)
            self._visit(value.__self__, "self")
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._visit(part, path)
        elif isinstance(value, type):
            self._visit_class(value)
        elif is_cache(value):
            self._reach.caches.append(value)
            self._visit(getattr(value, "__wrapped__", None), path)
        elif isinstance(value, (tuple, frozenset)):
            for index, item in enumerate(value):
                self._visit(item, f"{path}.{index}")
        elif isinstance(value, CONTAINERS):
            self._visit_container(value, path)
        else:
            self._visit_object(value, path)

    def _visit_function(self, function: FunctionType) -> None:
        code = function.__code__
        if not is_own_file(code.co_filename) and not code.co_filename.startswith("<"):
            return  # code that was typed in is the user's, too
        name = function.__name__
        for variable, cell in closure_of(function):
            if not variable.startswith("__"):
                self._reach.variables.append((cell, variable))
                self._visit(read_cell(cell), variable)
        used = {name for name in names_of(code) if not name.startswith("__")}
        self._asks_for_instances |= "local" in used
        self._visit_names(function.__globals__, used, "")
        for default in _defaults_of(function):
            self._visit(default, f"a default of {name}")
        self._visit(vars(function), name)

    def _visit_names(self, space: dict[str, Any], names: Iterable[str], path: str) -> None:
        ordered = tuple(sorted(names))
        self._reach.variables.append((ModuleNames(space, ordered), path))
        for name in ordered:
            value = space.get(name, MISSING)
            self._visit(value, join(path, name))
            if not path and isinstance(value, ModuleType) and is_users(value):
                self._visit_names(vars(value), vars(value).keys() & set(names), name)

    def _visit_class(self, cls: type) -> None:
        if is_foreign(cls):
            return
        self._reach.variables.append((cls, cls.__name__))
        for name, value in list(vars(cls).items()):
            held = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if not name.startswith("__") or isinstance(held, FunctionType):
                self._visit(held, f"{cls.__name__}.{name}")
        for base in cls.__bases__:
            self._visit(base, base.__name__)

    def _visit_container(self, container: Any, path: str) -> None:
        if len(container) > _LARGE:
            return
        self._reach.containers.append((container, path))
        if len(container) <= _MANY:
            for key, item in items_of(container):
                self._visit(item, f"{path}.{key}")

    def _visit_object(self, value: Any, path: str) -> None:
        if is_stateful(value):
            self._reach.others.append((value, path))
            return
        instance = self._instance_of(value)
        if instance is not None:
            self._instances += [(obj, path) for obj in instance]
            return
        kind: Any = type(value)
        if is_foreign(kind) and not isinstance(
            value, (torch.nn.Module, SimpleNamespace, *TRAINERS)
        ):
            return
        if isinstance(value, TRAINERS):
            self._reach.trainers.append(path)
        if has_slots(value):
            self._reach.others.append((value, path))
        if isinstance(getattr(value, "__dict__", None), dict):
            self._visit_container(vars(value), path)
        self._visit(kind, kind.__name__)


def reach_near(
    function: Callable[..., Any],
    known: Iterable[Any],
    classes: Iterable[type],
    depth: int,
) -> Reach:
    """Walk what a function's code names: its closure, its globals, its defaults and some classes.

    All containers among the names of its module are taken, but not walked.

    Args:
        function: the function.
        known: containers that are checked elsewhere.
        classes: classes to take beside those that the code names.
        depth: how many containers deep to look.
    """
    reach = Reach()
    code = getattr(function, "__code__", None)
    space: dict[str, Any] = getattr(function, "__globals__", {})
    cells = {id(cell): (cell, name) for name, cell in _closures(function, NEAR)}
    used = names_of(code) if code is not None else ()
    near = [(name, space[name]) for name in dict.fromkeys(used) if name in space]
    near += [(name, read_cell(cell)) for cell, name in cells.values()]
    near += [(f"a default of {function.__name__}", value) for value in _defaults_of(function)]
    if inspect.isfunction(function):
        near.append((function.__name__, vars(function)))
    held = dict.fromkeys([*classes, *(value for _, value in near if _is_class_of_user(value))])
    near += [(f"{cls.__name__}.{name}", v) for cls in held for name, v in list(vars(cls).items())]
    reach.variables = [*cells.values(), *((cls, cls.__name__) for cls in held)]
    reach.containers.append((space, ""))
    seen = {id(container) for container in known}
    _add_containers(near, depth, reach, seen)
    _add_containers(space.items(), 0, reach, seen)
    reach.caches = [value for _, value in (*space.items(), *near) if is_cache(value)]
    return reach


def reach_modules(modules: Iterable[ModuleType]) -> Reach:
    """The names of the user's modules, and the containers among their values, not walked.

    A large program has thousands of names, and this is asked once a call. So whether a value is a
    container is told by its class, which is looked at once.
    """
    reach = Reach()
    seen: set[int] = set()
    holds: dict[type, bool] = {}
    for module in modules:
        space = vars(module)
        reach.containers.append((space, module.__name__))
        holders = []
        for name, value in list(space.items()):
            cls = type(value)
            if cls not in holds:
                holds[cls] = isinstance(value, CONTAINERS) or is_walked(value)
            if holds[cls] and not name.startswith("__"):
                holders.append((name, value))
        _add_containers(holders, 0, reach, seen)
    return reach


def _add_containers(
    named: Iterable[tuple[str, Any]], depth: int, reach: Reach, seen: set[int]
) -> None:
    """Add the containers among values, and the attributes of plain objects among them."""
    for name, value in named:
        if isinstance(value, CONTAINERS):
            content = value
        elif is_walked(value):
            content = vars(value)
        else:
            continue
        many = len(content) > _FEW or len(reach.containers) > _MANY
        if name.startswith("__") or many or id(content) in seen:
            continue
        seen.add(id(content))
        reach.containers.append((content, name))
        if depth:
            inner = [(f"{name}.{key}", item) for key, item in items_of(content)]
            _add_containers(inner, depth - 1, reach, seen)


def _is_class_of_user(value: Any) -> bool:
    return isinstance(value, type) and not issubclass(value, enum.Enum) and not is_foreign(value)


def _closures(function: Any, depth: int) -> Iterator[tuple[str, CellType]]:
    """The closure of a function, and of functions in it."""
    for name, cell in closure_of(function):
        yield name, cell
        if depth and inspect.isfunction(read_cell(cell)):
            yield from _closures(read_cell(cell), depth - 1)


def _defaults_of(function: Any) -> list[Any]:
    named = getattr(function, "__kwdefaults__", None) or {}
    return [*(getattr(function, "__defaults__", None) or ()), *named.values()]


def has_fake(value: Any, depth: int = NEAR) -> bool:
    """True if a value is a fake tensor, or a container with one."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple, set, frozenset)):
        return isinstance(value, FakeTensor)
    return depth > 0 and any(has_fake(item, depth - 1) for item in value)


def reaches_tensor(value: Any, known: set[int]) -> bool:
    """True if a value reaches a tensor, other than through objects in `known` (by id).

    The walk adds the objects that it has entered to `known`.
    """
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, SCALARS) or id(value) in known:
        return False
    known.add(id(value))
    return any(reaches_tensor(part, known) for part in parts_of(value))


def parts_of(value: Any) -> list[Any]:
    """What a value holds: items, attributes, and what a function closes over or has as defaults."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return list(value)
    if isinstance(value, ModuleType):
        return []
    parts: list[Any] = list(getattr(value, "__dict__", {}).values())
    parts += slots_of(value).values()
    if isinstance(value, MethodType):
        parts += [value.__self__, value.__func__]
    elif isinstance(value, FunctionType):
        parts += [read_cell(cell) for _, cell in closure_of(value)]  # MISSING holds no tensor
        parts += _defaults_of(value)
    elif isinstance(value, functools.partial):
        parts += [value.func, *value.args, *value.keywords.values()]
    return parts
