"""Refuse state that actors of different ranks hold and that one of them changes.

In one process they would hold one thing. In several, each has a copy of its own, and nothing keeps
the copies equal. What is only read stays equal. Traced functions are known to change a tensor, or
to add to its gradient; what opaque methods change is seen when they run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from ...ir.module import FunctionKind
from ..errors import TraceError
from ..functions.interface import Body
from ..heap.snapshot import MISSING, Snapshot
from ..step.session import Session
from .holdings import Held
from .sharing import Sharing, plays_all

_LOOKS = 3
"""In how many calls of an opaque method Python's objects are looked at; tensors are in all."""

_TIED = (
    "weights are tied by sending them as a value: one actor owns the parameter and returns it from "
    "a method, the others take it as an argument (Tied weights, in docs/guide/steps.md). If each "
    "is to have its own, make it in the constructor, or pass copy.deepcopy(...)"
)


@dataclass(frozen=True)
class _Done:
    """Uses of shared state by the functions of an actor, in this step and earlier ones."""

    reads: frozenset[str]
    changes: dict[str, str]
    is_traced: bool
    is_opaque: bool

    def uses(self, path: str) -> bool:
        """True if it uses what is there. An actor that only opaque methods use uses everything."""
        only_opaque = self.is_opaque and not self.is_traced
        return only_opaque or path in self.reads or path in self.changes


def refuse_apart(session: Session) -> None:
    """Return unless one actor changes what one of another rank uses; and let opaque methods check.

    Collective, where there are other processes and actors of different ranks hold the same.

    Raises:
        TraceError: one does; on every rank.
    """
    sharing = session.sharing
    if sharing is None:
        return
    if sharing.memory or sharing.objects:
        done = _done(session, sharing)
        for holders in sharing.memory:
            _refuse(holders, done)
        for actor in sharing.members:
            _watch(session, sharing, actor, done)
    for use in sharing.uses.values():
        use.keep()


def _done(session: Session, sharing: Sharing) -> dict[str, _Done]:
    paths: dict[str, set[str]] = {}
    for held in (each for holders in sharing.memory for each in holders):
        paths.setdefault(held.actor, set()).add(held.path)
    mine = {
        name: _Done(
            frozenset(use.reads & paths[name]),
            {path: by for path, by in use.changes.items() if path in paths[name]},
            use.is_traced,
            use.is_opaque,
        )
        for name, use in sharing.uses.items()
        if name in paths
    }
    if plays_all(session.peers):
        return mine
    return {name: each for theirs in session.peers.allgather(mine) for name, each in theirs.items()}


def _refuse(holders: Sequence[Held], done: dict[str, _Done]) -> None:
    for one in holders:
        function = done[one.actor].changes.get(one.path) if one.actor in done else None
        other = _other_user(one, holders, done)
        if function is not None and other is not None:
            later = max(one, other, key=lambda held: held.order)
            raise TraceError(
                f"{_shown(one)} and {_shown(other)} are one tensor, which @{function} changes, or "
                "adds a gradient to; in processes each rank has a copy of its own, and nothing "
                "keeps the copies equal",
                loc=later.made,
                remedy=_TIED,
            )


def _other_user(one: Held, holders: Iterable[Held], done: dict[str, _Done]) -> Held | None:
    for other in holders:
        if other.rank != one.rank and other.actor in done and done[other.actor].uses(other.path):
            return other
    return None


def _shown(held: Held) -> str:
    where = "" if held.made is None else f", made at {held.made}"
    return f"'{_attribute(held.path)}' of {held.actor} (rank {held.rank}{where})"


def _attribute(path: str) -> str:
    """A path without the tuple that the instance is walked in."""
    return path.partition(".")[2] or path


@dataclass(frozen=True)
class _Watched:
    """A tensor, or an object, that an opaque method must leave as it is."""

    held: Held
    other: Held
    value: Any


def _watch(session: Session, sharing: Sharing, actor: str, done: dict[str, _Done]) -> None:
    """Let the opaque functions of a local actor check that they change nothing that is shared."""
    values = sharing.holdings[actor].values
    tensors = [
        _Watched(one, other, ref(values[one.path]))
        for holders in sharing.memory
        for one in holders
        if one.actor == actor and (other := _other_user(one, holders, done)) is not None
    ]
    objects = [
        _Watched(one, other, values[one.path])
        for holders in sharing.objects
        for one in holders
        if one.actor == actor
        and (other := next((h for h in holders if h.rank != one.rank), None)) is not None
    ]
    if not tensors and not objects:
        return
    for name, function in session.module.functions.items():
        if function.actor == actor and function.kind is FunctionKind.OPAQUE:
            session.bodies[name] = _checking(session.bodies[name], name, tensors, objects)


def _checking(
    body: Body, name: str, tensors: Sequence[_Watched], objects: Sequence[_Watched]
) -> Body:
    """The body, which raises a RuntimeError where it has changed what another rank's actor uses."""
    looks = _LOOKS

    @functools.wraps(body)
    def run(*inputs: Any) -> Sequence[Any]:
        nonlocal looks
        before = [_version(each.value()) for each in tensors]
        snapshots = [_snapshot(each.value) for each in objects] if looks else []
        results = body(*inputs)
        for each, version in zip(tensors, before, strict=True):
            if _version(each.value()) != version:
                raise _changed(name, each)
        for each, snapshot in zip(objects, snapshots, strict=False):
            if _has_changed(each.value, snapshot):
                raise _changed(name, each)
        looks = max(0, looks - 1)
        return results

    return run


def _changed(name: str, each: _Watched) -> RuntimeError:
    return RuntimeError(
        f"the opaque method @{name} has changed {_shown(each.held)}, which is {_shown(each.other)} "
        "as well; in processes each rank has a copy of its own, and nothing keeps the copies "
        "equal. Send what changes as a value: return it from a method of one actor, and pass it to "
        "the other. If each is to have its own, make it in the constructor, or pass "
        "copy.deepcopy(...)"
    )


def _version(tensor: torch.Tensor | None) -> tuple[int, ...]:
    """Changes when a tensor is written to, and when its gradient is."""
    if tensor is None or tensor.is_inference():
        return ()
    grad = tensor.grad if tensor.is_leaf else None
    own = tensor._version
    return (own,) if grad is None or grad.is_inference() else (own, id(grad), grad._version)


def _snapshot(value: Any) -> Snapshot:
    return Snapshot([(vars(value) if hasattr(value, "__dict__") else value, "")])


def _has_changed(value: Any, snapshot: Snapshot) -> bool:
    """True if it has changed; new attributes of an object may be what it has cached."""
    changes = snapshot.changes()
    if isinstance(value, dict | list | set) or not hasattr(value, "__dict__"):
        return bool(changes)
    return any(change.before is not MISSING for change in changes)
