"""Snapshots of an actor's attributes: what a traced call changed, and how to put it back.

A snapshot is a shallow copy of every container that the actor reaches, so it costs no copy of a
tensor. Comparing goes by identity, and by value where a value says everything about itself.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..actors.actor_state import SCALARS
from ..errors import TraceError


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()
"""Stands for the value of a key that is not there."""


@dataclass(frozen=True, eq=False, slots=True)
class Change:
    """One difference between a snapshot and now.

    Attributes:
        container: the dict, list, set or deque that changed.
        key: the key or index; None where the container changed as a whole.
        path: in words, from the actor: `hist` or `blocks.0.step`.
        before, after: the values; `MISSING` where there was, or is, none.
    """

    container: Any
    key: Any
    path: str
    before: Any
    after: Any


@dataclass(frozen=True, eq=False)
class Initialization:
    """A change that may be one of the first call only, such as of an attribute made when needed.

    Attributes:
        owner: the `id` of the object whose attribute it is; None inside of a container.
        container, key: where; no key for a container that changed as a whole.
        before, content: what was there, and what is there now; `MISSING` for nothing.
        refusal: makes what to raise if it is not of the first call only; a
            `TraceError` that has been made counts as raised (`errors.py`).
    """

    owner: int | None
    container: Any
    key: Any
    before: Any
    content: Any
    refusal: Callable[[], TraceError]

    def apply(self) -> None:
        """Make the change for good."""
        self._put(self.content)

    def take_back(self) -> None:
        """Let all be as before, whether the change has been made or not."""
        self._put(self.before)

    def _put(self, content: Any) -> None:
        if self.key is None:
            refill(self.container, content)
        elif content is MISSING:
            self.container.pop(self.key, None)
        else:
            self.container[self.key] = content


class Snapshot:
    """The contents of containers at one moment."""

    def __init__(self, containers: Iterable[tuple[Any, str]]) -> None:
        self._copies = [(c, path, _shallow(c)) for c, path in containers]

    def restore(self) -> None:
        """Put every container back to what it held."""
        for container, _, copy in self._copies:
            if not _identical(container, copy):
                refill(container, copy)

    def changes(self) -> list[Change]:
        """What has changed since."""
        found: list[Change] = []
        for container, path, copy in self._copies:
            if not _identical(container, copy):
                found.extend(_differences(container, path, copy))
        return found


def _shallow(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _identical(container: Any, copy: Any) -> bool:
    if len(container) != len(copy):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), copy.items(), strict=True)
        return all(a is b and x is y for (a, x), (b, y) in pairs)
    return all(x is y for x, y in zip(container, copy, strict=True))


def refill(container: Any, copy: Any) -> None:
    """Let a container hold what `copy` holds."""
    if isinstance(container, list):
        container[:] = copy
        return
    container.clear()
    if isinstance(container, collections.deque):
        container.extend(copy)
    else:
        container.update(copy)


def _differences(container: Any, path: str, copy: Any) -> Iterator[Change]:
    if isinstance(container, dict):
        for key in {**copy, **container}:
            before, after = copy.get(key, MISSING), container.get(key, MISSING)
            if not same(before, after):
                yield Change(container, key, _path(path, key), before, after)
    elif isinstance(container, list) and len(container) == len(copy):
        for index, (before, after) in enumerate(zip(copy, container, strict=True)):
            if not same(before, after):
                yield Change(container, index, _path(path, index), before, after)
    else:
        yield Change(container, None, path or "a container", copy, container)


def _path(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def same(before: Any, after: Any) -> bool:
    """Whether two values are one object, or alike: equal plain data in containers of one kind."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, (tuple, list)):
        return len(before) == len(after) and all(map(same, before, after))
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(same(before[k], after[k]) for k in before)
    return isinstance(before, SCALARS) and bool(before == after)
