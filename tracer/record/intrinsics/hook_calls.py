"""Record the calls of hooks that `register_post_accumulate_grad_hook` has put on parameters.

Plain PyTorch calls such a hook in each `.backward()`, once the gradient of its parameter is in
`.grad`. A step calls it once for each `cg.backward`, behind all additions to its actor's gradients
and behind their reduction: an opaque method of the actor calls all its hooks. So nothing that
computes with the parameter's old value comes after it, and everything recorded later sees what it
has done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....ir.location import Location
from ....ir.types import Place
from ...errors import TraceError
from ...values.actor_state import StateAttribute, collect
from ...values.heap.gradient_hooks import post_accumulate_hooks
from ...values.interface import Callee, MethodTarget, Target
from ...values.opaque import opaque
from ..groups.gradient_sums import reduce_gradients
from ..session.arguments import take_apart
from ..session.calls import find_or_declare, record
from ..session.session import Session
from ..session.tape import ReachedCall


def record_hooks(session: Session, calls: Iterable[ReachedCall], loc: Location | None) -> None:
    """Record, behind a backward, the calls of the hooks of the parameters that it has reached.

    Args:
        session: the trace.
        calls: the calls that the backward goes through, with their derivatives.
        loc: the line of the backward.

    Raises:
        TraceError: the backward is that of one microbatch.
    """
    actors: dict[str, _HookedActor] = {}
    for reached in calls:
        name = reached.callee.declaration.actor
        assert reached.call.vjp is not None
        paths = session.hooked[reached.call.vjp.name]
        if name is not None and paths:
            actor = actors.setdefault(name, _HookedActor(reached.callee, {}))
            actor.paths.update(dict.fromkeys(paths))
            _refuse_microbatches(session, name, paths[0], loc)
    before: list[_HookedActor] = []
    for name, actor in actors.items():
        reduce_gradients(session, name, loc)
        _record(session, name, actor, before, loc)
        before.append(actor)


def _refuse_microbatches(session: Session, actor: str, path: str, loc: Location | None) -> None:
    if session.mb is not None:
        raise TraceError(
            f"cg.backward in a loop over microbatches reaches '{path}' of {actor}, and its hook of "
            "register_post_accumulate_grad_hook would run with the gradient of each microbatch, as "
            "an update between microbatches",
            loc=loc,
            remedy="collect the losses in the loop, and call cg.backward(cg.mean(losses)) behind "
            "it: the hook then runs once, with the gradient of the whole batch",
        )


@dataclass(frozen=True)
class _HookedActor:
    """An actor with hooked parameters that a backward has reached.

    Attributes:
        callee: a function of the actor.
        paths: the paths of the parameters, as keys.
    """

    callee: Callee
    paths: dict[str, None]

    def on(self, instance: Any) -> _HookedParameters:
        """The parameters of an instance."""
        return _HookedParameters(instance, tuple(self.paths))


def _record(
    session: Session,
    name: str,
    actor: _HookedActor,
    before: Sequence[_HookedActor],
    loc: Location | None,
) -> None:
    """Record the call for one actor; parameters that it shares with those `before` are done."""
    callee = actor.callee
    assert callee.owner is not None
    group = session.groups.get(name)
    place = Place.of(callee.owner[0]) if group is None else group.mesh

    def subject() -> tuple[Target | None, tuple[int, ...], str]:
        target, base = callee.target, f"{name}.gradient_hooks"
        if not isinstance(target, MethodTarget):
            return None, place.ranks, base
        done = [
            other.on(other.callee.target.instance)
            for other in before
            if isinstance(other.callee.target, MethodTarget)
        ]
        method = replace(
            target,
            method="gradient_hooks",
            remat=False,
            function=_caller(actor, done),
            group=None if group is None else group.group(()),
        )
        return method, place.ranks, base

    called = ("gradient_hooks", name, *actor.paths, *((*other.paths,) for other in before))
    with torch._C.DisableTorchFunction():
        arguments = take_apart(session, (), {}, "cg.backward", loc)
    hooks = find_or_declare(session, called, arguments, subject, loc)
    record(session, hooks, arguments, place, loc)


def _caller(actor: _HookedActor, done: Sequence[_HookedParameters]) -> Callable[[Any], None]:
    """A method that calls the hooks of an instance, but for those of parameters that are done."""
    of_instance: dict[int, _HookedParameters] = {}

    @opaque
    def gradient_hooks(instance: Any) -> None:
        own = of_instance.get(id(instance))
        if own is None:
            own = of_instance[id(instance)] = actor.on(instance)
        called = {id(tensor) for others in done for tensor in others.tensors()}
        with torch.no_grad():  # as in torch's backward
            for tensor in own.tensors():
                if id(tensor) not in called:
                    _call_hooks(tensor)

    return gradient_hooks


def _call_hooks(tensor: torch.Tensor) -> None:
    for hook in post_accumulate_hooks(tensor):
        result = hook(tensor)
        if result is not None and not isinstance(result, torch.Tensor):
            raise TypeError(
                "a hook of register_post_accumulate_grad_hook returned a value of type "
                f"{type(result).__name__}; it returns None, and changes the parameter or its .grad "
                "in place"
            )


class _HookedParameters:
    """The hooked parameters of an instance, as they are when they are asked for.

    Args:
        instance: the instance.
        paths: their paths.
    """

    def __init__(self, instance: Any, paths: Sequence[str]) -> None:
        self._instance = instance
        self._paths = paths
        self._slots: list[StateAttribute] | None = None

    def tensors(self) -> list[torch.Tensor]:
        """The parameters, the last first."""
        if self._slots is None:
            by_path = {state.path: state for state in collect(self._instance).tensors}
            self._slots = [by_path[path].slots[0] for path in by_path if path in set(self._paths)]
        return [slot.get() for slot in reversed(self._slots)]
