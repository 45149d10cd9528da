"""Clip gradients by their norm over several actors.

The norm needs the gradients of all actors, and each actor's update needs the norm. So all ranks
have to wait for the norm. An optimistic step assumes that no gradient has to be clipped, and
returns whether this was true; if it was not, `launch/api/optimistic.py` undoes and repeats it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ...errors import TraceError
from ...source import caller_location
from ...values.actor_state import collect, reach
from ...values.group import GroupActor
from ...values.holdings import Member
from ...values.opaque import opaque
from ...values.values import TracedTensor
from ..actors.actors import ActorHandle, library_method
from ..groups import gradient_norms as groups
from ..session.session import Session, recording


def clip_grad_norm(
    actors: Sequence[ActorHandle], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale the gradients of all actors' parameters so that their norm is at most `max_norm`.

    The norm is taken over all gradients together, as if they were one vector. With all actors in
    one process this is `torch.nn.utils.clip_grad_norm_` on all their parameters, and gives the same
    bits if every parameter has a gradient. A parameter that several of the actors hold counts once.
    Call it after `cg.backward`, before the actors' updates. It counts as a write to each actor.

    Args:
        actors: the actors, on any ranks. An actor's parameters are those of `parameters()`; if it
            is not an `nn.Module`, all tensors in its attributes that require a gradient.
        max_norm: the largest norm that is left as it is, above 0.
        norm_type: the order of the norm, from 0; `math.inf` for the largest element. As in torch,
            0 counts the parameters with a gradient that is not 0.

    Returns:
        The norm before clipping: a scalar of the type that the parameters have, on the rank of the
        last actor that trains any; 0 if none does.

    Raises:
        TraceError: `actors` is empty, or holds something other than actors; `max_norm` is not
            above 0, or `norm_type` is below 0.
    """
    session = recording("cg.clip_grad_norm")
    _check(actors, max_norm, norm_type)
    with torch.no_grad():
        holders = ClippedActors(tuple(actor._member for actor in actors))
        norms = [_norms(session, actor, norm_type, holders) for actor in actors]
        # The dtype of an actor that trains nothing does not count; torch's norm of nothing is 0.
        counted = [norm for norm in norms if norm.shape[0]]
        total: Tensor
        if counted:
            total = torch.linalg.vector_norm(torch.cat(counted), norm_type)
        else:
            total = norms[-1].sum()
        # The same computation as in torch, so that the bits are the same.
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        if session is not None and session.optimistic:
            assumption = coefficient >= 1.0
            assert isinstance(assumption, TracedTensor)
            session.assumptions.append(assumption)
            return total
        for actor in actors:
            library_method(actor, scale_gradients)(coefficient, holders)
    return total


def _norms(
    session: Session | None, actor: ActorHandle, norm_type: float, holders: ClippedActors
) -> Tensor:
    """The norms of an actor's gradients, (trained parameters,)."""
    group = actor._member.group
    if session is not None and group is not None:
        return groups.gradient_norms(session, group, norm_type, caller_location(3))
    norms: Tensor = library_method(actor, gradient_norms)(norm_type, holders)
    return norms


def _check(actors: Sequence[Any], max_norm: float, norm_type: float) -> None:
    loc = caller_location(3)
    if not actors:
        raise TraceError("cg.clip_grad_norm of no actors", loc=loc, remedy="give it at least one")
    for actor in actors:
        if not isinstance(actor, ActorHandle):
            raise TraceError(
                f"cg.clip_grad_norm of a {type(actor).__name__}, which is not an actor",
                loc=loc,
                remedy="give it a list of actors, as Stage.on(rank)(...) makes them",
            )
    if not max_norm > 0:
        raise TraceError(
            f"cg.clip_grad_norm with max_norm={max_norm}",
            loc=loc,
            remedy="give a number above 0; math.inf measures the norm and clips nothing",
        )
    if not norm_type >= 0:
        raise TraceError(
            f"cg.clip_grad_norm with norm_type={norm_type}; a norm below 0 says nothing of the "
            "other gradients where one is 0 or is not there",
            loc=loc,
            remedy="give 2.0, 1.0, math.inf for the largest element, or another number from 0",
        )


def _trained(actor: Any) -> Iterator[Tensor]:
    if isinstance(actor, torch.nn.Module):
        return (p for p in actor.parameters() if p.requires_grad)
    return (state.tensor for state in collect(actor).tensors if state.is_trained)


@dataclass(frozen=True)
class ClippedActors:
    """The actors whose gradients are clipped together. Several may hold the same parameter.

    A parameter counts for the actor that has trained it, or else for the first actor that holds
    it. So a rank counts the same gradients whether or not its process plays other ranks, too.
    """

    members: tuple[Member, ...]

    @property
    def _groups(self) -> Iterator[GroupActor]:
        return (member.group for member in self.members if member.group is not None)

    def left_to_others(self, actor: Any) -> set[int]:
        """The ids of a local actor's parameters that count for other actors."""
        if any(actor in group.instances.values() for group in self._groups):
            return set()  # an actor on a mesh shares no tensor
        local_members = [(i, member) for i, member in enumerate(self.members) if member.held]
        at = next(i for i, member in local_members if member.held[0] is actor)
        counted_elsewhere: set[int] = set()
        own_ids = _ids(_trained(actor)) if len(local_members) > 1 else counted_elsewhere
        for i, member in local_members:
            common = set() if i == at else own_ids & _ids(_trained(member.held[0]))
            if common:
                own, other = common & _changed(self.members[at]), common & _changed(member)
                counted_elsewhere |= other - own
                counted_elsewhere |= common - (own ^ other) if i < at else set()
        return counted_elsewhere


def _ids(tensors: Iterable[Tensor]) -> set[int]:
    return {id(tensor) for tensor in tensors}


def _changed(member: Member) -> set[int]:
    """The ids of the tensors that a local actor's traced functions change, or add gradients to."""
    tensors = reach(member.held).tensors
    return _ids(state.tensor for state in tensors if state.path in member.use.changes)


def _no_norms(actor: Any, norm_type: float, holders: ClippedActors) -> Tensor:
    """The fake of `gradient_norms`: its result without elements."""
    dtypes = [parameter.dtype for parameter in _trained(actor)]
    common = reduce(torch.promote_types, dtypes) if dtypes else torch.float32
    return torch.empty(len(dtypes), dtype=common)


@opaque(fake=_no_norms)
def gradient_norms(actor: Any, norm_type: float, holders: ClippedActors) -> Tensor:
    """The norms of an actor's gradients, (parameters,).

    A parameter has norm 0 if it has no gradient, or counts for another actor.
    """
    counted_elsewhere = holders.left_to_others(actor)
    # A parameter may rest on the host, and its gradient does not.
    device = next((p.grad.device for p in _trained(actor) if p.grad is not None), None)
    norms = [
        p.new_zeros((), device=device)
        if p.grad is None or id(p) in counted_elsewhere
        else torch.linalg.vector_norm(p.grad, norm_type)
        for p in _trained(actor)
    ]
    return torch.stack(norms) if norms else torch.zeros(0)


@opaque
def scale_gradients(actor: Any, coefficient: Tensor, holders: ClippedActors) -> None:
    """Multiply each gradient that counts for this actor by a scalar."""
    counted_elsewhere = holders.left_to_others(actor)
    for parameter in _trained(actor):
        if parameter.grad is not None and id(parameter) not in counted_elsewhere:
            parameter.grad.mul_(coefficient.to(parameter.grad.device))
