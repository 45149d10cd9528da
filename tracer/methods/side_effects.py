"""Watching what a traced call changes outside of its actor: globals, closures, classes, defaults.

Such a change would happen once, while the call is traced, and what is left behind may be a fake. It
is taken back, and is an error that names what has changed; but what a function does in its first
call only, such as to fill a table of numbers, is done for good (`twice.py`).
"""

from __future__ import annotations

import collections
import enum
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, CodeType
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from ...ir.location import Location
from ..actors.actor_state import ActorState, is_walked, reaches_tensor
from ..errors import TraceError
from ..functions.error_translation import is_installed
from .fingerprint import MISSING, Change, Initialization, Snapshot, refill, same

_FEW = 1000
_MANY = 10_000
_DEPTH = 3
_REMEDY = (
    "keep what changes in a buffer of the actor (self.register_buffer), which a traced method may "
    "update; or mark the method with @cg.opaque"
)


class Surroundings:
    """What a function, and the classes of its actor, refer to at one moment.

    Of a function of an installed package, only traced values that it leaves behind are noticed:
    nobody but its authors could change what else it does.

    Args:
        function: what is to be traced.
        state: the actor's state, which is looked after elsewhere.
    """

    def __init__(self, function: Callable[..., Any], state: ActorState) -> None:
        function = inspect.unwrap(getattr(function, "__func__", function))
        code = getattr(function, "__code__", None)
        self._strict = code is not None and not is_installed(code.co_filename)
        space: dict[str, Any] = getattr(function, "__globals__", {})
        self._cells = {id(cell): (name, cell) for name, cell in _cells(function, _DEPTH)}
        self._before = {key: _content(cell) for key, (_, cell) in self._cells.items()}
        used = {name: space[name] for name in names_of(code) if name in space} if code else {}
        near = [*used.items(), *((self._cells[k][0], v) for k, v in self._before.items())]
        near += _defaults(function)
        classes = {*_own_classes(state), *(v for _, v in near if _is_class_of_user(v))}
        self._classes = [(cls, dict(vars(cls))) for cls in classes]
        for cls, held in self._classes:
            near += [(f"{cls.__name__}.{name}", value) for name, value in held.items()]
        named = [*space.items(), *near]
        holders = {id(container): (container, path) for container, path in state.containers}
        known = set(holders)
        _find_containers(near, _DEPTH if self._strict else 0, holders)
        _find_containers(space.items(), 0, holders)
        for key in known:
            del holders[key]
        self._snapshot = Snapshot([(space, ""), *holders.values()])
        self._caches = [(v, v.cache_info().misses) for _, v in named if _is_cache(v)]
        self._found: list[Change] = []
        self._found_cells: list[int] = []

    def check(self, what: str, loc: Location | None) -> list[Initialization]:
        """Look for changes.

        Returns:
            Those that may be of the first call only.

        Raises:
            TraceError: there is another one.
        """
        self._search()
        for key in self._found_cells:
            name, cell = self._cells[key]
            before, after = self._before[key], _content(cell)
            if not has_fake(after):
                raise _lost(what, name, before, after, loc)
            raise _stored(what, name, loc)
        changes = [*self._found, *(self._class_changes() if self._strict else ())]
        for change in changes:
            if has_fake(change.after):
                raise _stored(what, change.path, loc)
            if reaches_tensor(change.after, set()):
                raise _lost(what, change.path, change.before, change.after, loc)
        return [
            Initialization(
                None,
                c.container,
                c.key,
                list(c.before) if c.key is None else c.before,
                list(c.after) if c.key is None else c.after,
                partial(_lost, what, c.path, c.before, c.after, loc),
            )
            for c in changes
        ]

    def _search(self) -> None:
        self._found = [c for c in self._snapshot.changes() if self._counts(c)]
        self._found_cells = [
            key
            for key, (_, cell) in self._cells.items()
            if not same(self._before[key], _content(cell))
            and (self._strict or has_fake(_content(cell)))
        ]

    def _counts(self, change: Change) -> bool:
        hidden = isinstance(change.key, str) and change.key.startswith("__")
        return has_fake(change.after) or (self._strict and not hidden)

    def _class_changes(self) -> list[Change]:
        found = []
        for cls, before in self._classes:
            after = vars(cls)
            for name in {**before, **after}:
                old, new = before.get(name, MISSING), after.get(name, MISSING)
                if not name.startswith(("__", "_abc_")) and not same(old, new):
                    path = f"{cls.__name__}.{name}"
                    found.append(Change(_Attributes(cls), name, path, old, new))
        return found

    def undo(self) -> None:
        """Take every change back."""
        self._search()
        for change in (*self._found, *self._class_changes()):
            _put_back(change)
        for key in self._found_cells:
            if self._before[key] is not MISSING:
                self._cells[key][1].cell_contents = self._before[key]
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()  # it may hold traced values


class _Attributes:
    """The attributes of a class, to be set by their names as in a dict."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._cls, name, value)

    def pop(self, name: str, default: Any) -> None:
        """Delete an attribute, if it is there."""
        if name in vars(self._cls):
            delattr(self._cls, name)


def _stored(what: str, path: str, loc: Location | None) -> TraceError:
    return TraceError(
        f"{what} cannot be traced: it stores a traced value outside the actor, in '{path}'",
        loc=loc,
        remedy="return the value, keep it in a buffer of the actor, or mark the method with "
        "@cg.opaque",
    )


def _lost(what: str, path: str, before: Any, after: Any, loc: Location | None) -> TraceError:
    return TraceError(
        f"{what} cannot be traced: it changes '{path}', outside of the actor's attributes (from "
        f"{_words(before)} to {_words(after)}); a traced method runs once, so the change would be "
        "lost",
        loc=loc,
        remedy=_REMEDY,
    )


def names_of(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in a function's code, and in functions in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_of(constant)


def _cells(function: Any, depth: int) -> list[tuple[str, CellType]]:
    """The closure of a function, and of functions in it."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    found: list[tuple[str, CellType]] = []
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        found.append((name, cell))
        if depth and inspect.isfunction(_content(cell)):
            found += _cells(_content(cell), depth - 1)
    return found


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return MISSING


def _defaults(function: Any) -> list[tuple[str, Any]]:
    """The defaults and the attributes of a function, by the names that messages use."""
    name = getattr(function, "__name__", "")
    values = [
        *(getattr(function, "__defaults__", None) or ()),
        *(getattr(function, "__kwdefaults__", None) or {}).values(),
    ]
    found: list[tuple[str, Any]] = [(f"a default of {name}", value) for value in values]
    if inspect.isfunction(function):
        found.append((name, vars(function)))
    return found


def _find_containers(
    named: Iterable[tuple[str, Any]], depth: int, found: dict[int, tuple[Any, str]]
) -> None:
    """Add the containers among values, and the attributes of plain objects among them.

    Args:
        depth: how many containers deep to look into them.
        found: by `id`, with their names; into what is there already nobody looks again.
    """
    for name, value in named:
        if isinstance(value, (list, dict, set, collections.deque)):
            content = value
        elif is_walked(value):
            content = vars(value)
        else:
            continue
        many = len(content) > _FEW or len(found) > _MANY
        if name.startswith("__") or many or id(content) in found:
            continue
        found[id(content)] = (content, name)
        if depth:
            items = content.items() if isinstance(content, dict) else enumerate(content)
            inner = [(f"{name}.{key}", item) for key, item in items]
            _find_containers(inner, depth - 1, found)


def _own_classes(state: ActorState) -> list[type]:
    """The classes of an actor's objects that the user wrote."""
    classes = {cls for obj, _ in state.objects for cls in type(obj).__mro__}
    return [cls for cls in classes if not is_foreign(cls)]


def _is_class_of_user(value: Any) -> bool:
    return isinstance(value, type) and not issubclass(value, enum.Enum) and not is_foreign(value)


def is_foreign(cls: type) -> bool:
    """Whether a class is of an installed package, or of Python itself."""
    root = cls.__module__.partition(".")[0]
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    return root in ("torch", "numpy", __name__.partition(".")[0]) or (
        root != "__main__" and (root in sys.stdlib_module_names or is_installed(file))
    )


def _is_cache(value: Any) -> bool:
    return callable(getattr(value, "cache_clear", None)) and callable(
        getattr(value, "cache_info", None)
    )


def _put_back(change: Change) -> None:
    if change.key is None:
        refill(change.container, change.before)
    elif change.before is MISSING:
        change.container.pop(change.key, None)
    else:
        change.container[change.key] = change.before


def has_fake(value: Any, depth: int = _DEPTH) -> bool:
    """Whether a value is a fake tensor, or a container with one."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple, set, frozenset)):
        return isinstance(value, FakeTensor)
    return depth > 0 and any(has_fake(item, depth - 1) for item in value)


def _words(value: Any) -> str:
    if value is MISSING:
        return "nothing"
    if isinstance(value, (list, dict, set)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
