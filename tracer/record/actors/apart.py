"""Refuse state that actors of different ranks share and that one of them changes.

In one process the actors would share one object. In several processes each has its own copy, and
nothing keeps the copies equal. Copies that are only read stay equal. The trace shows whether a
traced function changes a tensor, or adds to its gradient. Opaque methods are checked when they run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch

from ....ir.ops.module import FunctionKind
from ...errors import TraceError
from ...graph.codegen.bodies import wrapped
from ...values.heap.snapshot import MISSING, Snapshot
from ...values.holdings import Held, Use
from ...values.interface import Body
from ...values.sharing import Sharing, plays_all
from ..session.session import Session

_LOOKS = 3
"""The number of calls of an opaque method that compare Python objects; all compare tensors."""

_TIED = (
    "weights are tied by sending them as a value: one actor owns the parameter and returns it from "
    "a method, the others take it as an argument (Tied weights, in docs/guide/collectives.md). If "
    "each is to have its own, make it in the constructor, or pass copy.deepcopy(...)"
)


def refuse_apart(session: Session) -> None:
    """Refuse a step in which an actor changes state that an actor of another rank uses.

    Opaque functions are wrapped in a check. This is collective if there are other processes, and
    actors of different ranks share state.

    Raises:
        TraceError: a traced function changes such state; raised on every rank.
    """
    sharing = session.sharing
    if sharing is None:
        return
    if sharing.memory or sharing.objects:
        uses = _uses_of(session, sharing)
        for holders in sharing.memory:
            _refuse(holders, uses)
        for actor in sharing.members:
            _watch(session, sharing, actor, uses)
    for name, use in sharing.uses.items():
        sharing.members[name].use = replace(use, paths={})


def _uses_of(session: Session, sharing: Sharing) -> dict[str, Use]:
    paths: dict[str, set[str]] = {}
    for holder in (h for holders in sharing.memory for h in holders):
        paths.setdefault(holder.actor, set()).add(holder.path)
    own_uses = {name: use.of(paths[name]) for name, use in sharing.uses.items() if name in paths}
    if plays_all(session.peers):
        return own_uses
    return {
        name: use
        for rank_uses in session.peers.allgather(own_uses)
        for name, use in rank_uses.items()
    }


def _refuse(holders: Sequence[Held], uses: dict[str, Use]) -> None:
    for one in holders:
        function = uses[one.actor].changes.get(one.path) if one.actor in uses else None
        other = _other_user(one, holders, uses)
        if function is not None and other is not None:
            later = max(one, other, key=lambda holder: holder.order)
            raise TraceError(
                f"{_shown(one)} and {_shown(other)} are one tensor, which @{function} changes, or "
                "adds a gradient to; in processes each rank has a copy of its own, and nothing "
                "keeps the copies equal",
                loc=later.made_at,
                remedy=_TIED,
            )


def _other_user(one: Held, holders: Iterable[Held], uses: dict[str, Use]) -> Held | None:
    for other in holders:
        use = uses.get(other.actor)
        if other.rank != one.rank and use is not None and use.includes(other.path):
            return other
    return None


def _shown(holder: Held) -> str:
    where = "" if holder.made_at is None else f", made at {holder.made_at}"
    path = holder.path.partition(".")[2] or holder.path  # without the tuple around the instance
    return f"'{path}' of {holder.actor} (rank {holder.rank}{where})"


@dataclass(frozen=True)
class _ReadOnlyState:
    """A tensor or an object that an opaque method must not change.

    Attributes:
        held: where the method's actor holds it.
        other: where an actor of another rank holds it.
        value: a weak reference to the tensor, or the object.
    """

    held: Held
    other: Held
    value: Any


def _watch(session: Session, sharing: Sharing, actor: str, uses: dict[str, Use]) -> None:
    """Let the opaque functions of a local actor check that they change no shared state."""
    values = sharing.holdings[actor].values
    tensors = [
        _ReadOnlyState(one, other, ref(values[one.path]))
        for holders in sharing.memory
        for one in holders
        if one.actor == actor and (other := _other_user(one, holders, uses)) is not None
    ]
    objects = [
        _ReadOnlyState(one, other, values[one.path])
        for holders in sharing.objects
        for one in holders
        if one.actor == actor
        and (other := next((h for h in holders if h.rank != one.rank), None)) is not None
    ]
    if not tensors and not objects:
        return
    for name, function in session.module.functions.items():
        if function.actor == actor and function.kind is FunctionKind.OPAQUE:
            check = functools.partial(_checking, name=name, tensors=tensors, objects=objects)
            session.bodies[name] = wrapped(session.bodies[name], check)


def _checking(
    body: Body, name: str, tensors: Sequence[_ReadOnlyState], objects: Sequence[_ReadOnlyState]
) -> Body:
    """A body that raises a RuntimeError if it has changed state that another rank's actor uses."""
    looks = _LOOKS

    @functools.wraps(body)
    def run(*inputs: Any) -> Sequence[Any]:
        nonlocal looks
        before = [_version(watched.value()) for watched in tensors]
        snapshots = [_snapshot(watched.value) for watched in objects] if looks else []
        results = body(*inputs)
        for watched, version in zip(tensors, before, strict=True):
            if _version(watched.value()) != version:
                raise _changed(name, watched)
        for watched, snapshot in zip(objects, snapshots, strict=False):
            if _has_changed(watched.value, snapshot):
                raise _changed(name, watched)
        looks = max(0, looks - 1)
        return results

    return run


def _changed(name: str, watched: _ReadOnlyState) -> RuntimeError:
    return RuntimeError(
        f"the opaque method @{name} has changed {_shown(watched.held)}, which is "
        f"{_shown(watched.other)} as well; in processes each rank has a copy of its own, and "
        "nothing keeps the copies equal. Send what changes as a value: return it from a method of "
        "one actor, and pass it to the other. If each is to have its own, make it in the "
        "constructor, or pass copy.deepcopy(...)"
    )


def _version(tensor: torch.Tensor | None) -> tuple[int, ...]:
    """A version that changes whenever the tensor or its gradient is written to."""
    if tensor is None or tensor.is_inference():
        return ()
    grad = tensor.grad if tensor.is_leaf else None
    own = tensor._version
    return (own,) if grad is None or grad.is_inference() else (own, id(grad), grad._version)


def _snapshot(value: Any) -> Snapshot:
    return Snapshot([(vars(value) if hasattr(value, "__dict__") else value, "")])


def _has_changed(value: Any, snapshot: Snapshot) -> bool:
    """True if a value has changed. New attributes of an object may be caches, and do not count."""
    changes = snapshot.changes()
    if isinstance(value, dict | list | set) or not hasattr(value, "__dict__"):
        return bool(changes)
    return any(change.before is not MISSING for change in changes)
