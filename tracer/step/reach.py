"""What a function's Python refers to, and what it has changed of that.

From its closure, its globals, its defaults and its object one comes to functions, classes, modules,
containers and objects that the user wrote. All of it is looked at, nothing is kept alive for long.
Behind the handle of an actor one comes to its instance only where some code says `.local`.
Of installed packages nobody but their authors knows what they change, and why: they are left out.
"""

from __future__ import annotations

import collections
import functools
import inspect
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from ..actors.actor_state import SCALARS, TRAINERS
from ..actors.actors import ActorHandle
from ..functions.error_translation import is_installed
from ..methods.contents import Contents, has_slots, kind_of
from ..methods.fingerprint import MISSING, Snapshot, same
from ..methods.side_effects import is_foreign, names_of
from ..source import is_user_file

_MANY = 10_000
"""Items of a larger container are not looked into."""
_LARGE = 100_000
"""A larger container is not looked at."""
_CONTAINERS = (dict, list, set, collections.deque)
_RANDOM: Any = random
GENERATORS = (
    (_RANDOM._inst, "Python's random module"),
    (np.random.mtrand._rand, "NumPy's random generator"),
    (torch.default_generator, "torch's random generator"),
)
"""The generators that everybody shares, with their names in messages."""


@dataclass(frozen=True, eq=False)
class Binding:
    """A name that may be bound to something else: a variable, or an attribute of a class."""

    name: str
    space: Any
    key: str

    def read(self) -> Any:
        """What it is bound to; `MISSING` if to nothing."""
        if isinstance(self.space, CellType):
            try:
                return self.space.cell_contents
            except ValueError:  # an empty cell
                return MISSING
        if isinstance(self.space, dict):
            return self.space.get(self.key, MISSING)
        return vars(self.space).get(self.key, MISSING)

    def put(self, value: Any) -> None:
        """Bind it again."""
        if isinstance(self.space, CellType):
            if value is MISSING:
                del self.space.cell_contents
            else:
                self.space.cell_contents = value
        elif isinstance(self.space, dict):
            if value is MISSING:
                del self.space[self.key]
            else:
                self.space[self.key] = value
        elif value is MISSING:
            delattr(self.space, self.key)
        else:
            setattr(self.space, self.key, value)


class Reach:
    """What a function refers to.

    Attributes:
        bindings: the variables of its closure and its globals, and attributes of classes.
        containers: containers and attributes of objects, with their paths.
        others: what holds something else that can change, with its path.
        caches: functions that remember results.
        trainers: the paths of optimizers, schedulers and the like.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.bindings: list[Binding] = []
        self.containers: list[tuple[Any, str]] = []
        self.others: list[tuple[Any, str]] = []
        self.caches: list[Any] = []
        self.trainers: list[str] = []
        self._seen: set[int] = set()
        self._asks_for_instances = False
        self._handles: list[tuple[ActorHandle, str]] = []
        self._visit(function, getattr(function, "__name__", "the step"))
        while self._asks_for_instances and self._handles:
            handle, path = self._handles.pop()
            self._visit(handle.local, f"{path}.local")

    def _visit(self, value: Any, path: str) -> None:
        if isinstance(value, (*SCALARS, torch.Tensor, weakref.ref)) and not isinstance(value, type):
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
            self.caches.append(value)
            self._visit(getattr(value, "__wrapped__", None), path)
        elif isinstance(value, (tuple, frozenset)):
            for index, item in enumerate(value):
                self._visit(item, f"{path}.{index}")
        elif isinstance(value, _CONTAINERS):
            self._visit_container(value, path)
        else:
            self._visit_object(value, path)

    def _visit_function(self, function: FunctionType) -> None:
        code = function.__code__
        if not is_users_file(code.co_filename) and not code.co_filename.startswith("<"):
            return  # what was typed in is the user's, too
        name = function.__name__
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            self._bind(Binding(variable, cell, variable))
        used = set(names_of(code))
        self._asks_for_instances |= "local" in used
        for variable in sorted(used):
            self._bind(Binding(variable, function.__globals__, variable))
            held = function.__globals__.get(variable)
            if isinstance(held, ModuleType) and _is_the_users(held):
                for part in sorted(used & vars(held).keys()):
                    self._bind(Binding(f"{variable}.{part}", vars(held), part))
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        for default in defaults:
            self._visit(default, f"a default of {name}")
        self._visit(vars(function), name)

    def _bind(self, binding: Binding) -> None:
        if not binding.name.startswith("__"):
            self.bindings.append(binding)
            self._visit(binding.read(), binding.name)

    def _visit_class(self, cls: type) -> None:
        if is_foreign(cls):
            return
        for name, value in list(vars(cls).items()):
            if not name.startswith(("__", "_abc_")):
                self.bindings.append(Binding(f"{cls.__name__}.{name}", cls, name))
            held = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if not name.startswith("__") or isinstance(held, FunctionType):
                self._visit(held, f"{cls.__name__}.{name}")
        for base in cls.__bases__:
            self._visit(base, base.__name__)

    def _visit_container(self, container: Any, path: str) -> None:
        if len(container) > _LARGE:
            return
        self.containers.append((container, path))
        if len(container) <= _MANY:
            items = container.items() if isinstance(container, dict) else enumerate(container)
            for key, item in list(items):
                self._visit(item, f"{path}.{key}")

    def _visit_object(self, value: Any, path: str) -> None:
        if kind_of(value) is not None:
            self.others.append((value, path))
            return
        if isinstance(value, ActorHandle):
            if value.is_local:
                self._handles.append((value, path))
            return
        kind: Any = type(value)
        if is_foreign(kind) and not isinstance(
            value, (torch.nn.Module, SimpleNamespace, *TRAINERS)
        ):
            return
        if isinstance(value, TRAINERS):
            self.trainers.append(path)
        if has_slots(value):
            self.others.append((value, path))
        if isinstance(getattr(value, "__dict__", None), dict):
            self._visit_container(vars(value), path)
        self._visit(kind, kind.__name__)


def is_users_file(file: str) -> bool:
    """Whether the user wrote a file; installed packages are others' work."""
    return is_user_file(file) and not is_installed(file)


def _is_the_users(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and is_users_file(file)


def is_cache(value: Any) -> bool:
    """Whether a function remembers results, as by `functools.lru_cache`."""
    return inspect.isroutine(getattr(value, "cache_clear", None)) and callable(value)


@dataclass(frozen=True, eq=False)
class Difference:
    """Something that has changed.

    Attributes:
        path: its name.
        after: its value now, if that is known.
        watch: gives a function that tells whether it has changed again since `watch` was called.
    """

    path: str
    after: Any
    watch: Callable[[], Callable[[], bool]]


class Remembered:
    """What a function refers to, as it was at one moment."""

    def __init__(self, function: Callable[..., Any]) -> None:
        reach = Reach(function)
        self._trainers = reach.trainers
        self._bindings = [(binding, binding.read()) for binding in reach.bindings]
        self._snapshot = Snapshot(reach.containers)
        self._others = [(each, Contents([each])) for each in reach.others]
        self._generators = [(each, Contents([each])) for each in GENERATORS]
        self._caches = [(cache, cache.cache_info().misses) for cache in reach.caches]

    def draws(self) -> list[Difference]:
        """The shared random generators that have been drawn from, or seeded."""
        return _changed(self._generators)

    def differences(self) -> list[Difference]:
        """What else has changed since."""
        found: list[Difference] = []
        for binding, before in self._bindings:
            after = binding.read()
            if not same(before, after):
                watch = functools.partial(_watch_binding, binding)
                found.append(Difference(binding.name, after, watch))
        for change in self._snapshot.changes():
            if not (isinstance(change.key, str) and change.key.startswith("__")):
                watch = functools.partial(_watch_container, change.container)
                found.append(Difference(change.path, change.after, watch))
        return found + _changed(self._others)

    def is_of_trainer(self, path: str) -> bool:
        """Whether an optimizer, a scheduler or the like holds what is at a path."""
        return any(f"{path}.".startswith(f"{trainer}.") for trainer in self._trainers)

    def filled_caches(self) -> list[Any]:
        """The caches that have come to hold something new."""
        return [cache for cache, misses in self._caches if cache.cache_info().misses != misses]

    def restore(self) -> None:
        """Put everything back, and empty caches that have been filled."""
        for binding, before in self._bindings:
            if not same(before, binding.read()):
                binding.put(before)
        self._snapshot.restore()
        for _, contents in (*self._others, *self._generators):
            contents.restore()
        for cache in self.filled_caches():
            cache.cache_clear()


def _watch_binding(binding: Binding) -> Callable[[], bool]:
    now = binding.read()
    return lambda: not same(now, binding.read())


def _watch_container(container: Any) -> Callable[[], bool]:
    now = Snapshot([(container, "")])
    return lambda: bool(now.changes())


def _watch_content(each: tuple[Any, str]) -> Callable[[], bool]:
    now = Contents([each])
    return lambda: bool(now.changed())


def _changed(held: list[tuple[tuple[Any, str], Contents]]) -> list[Difference]:
    return [
        Difference(each[1], None, functools.partial(_watch_content, each))
        for each, contents in held
        if contents.changed()
    ]
