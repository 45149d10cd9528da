"""Clip gradients by their norm over several actors.

The norm needs the gradients of all actors, and each actor's update needs the norm. So in a step the
norm is where all ranks meet. A step that is traced to be optimistic assumes that nothing has to be
clipped, and says so beside its results; see `launch/api/optimistic.py` for what becomes of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..actors.actor_state import collect, reach
from ..actors.actors import ActorHandle, library_method
from ..actors.holdings import Member
from ..errors import TraceError
from ..groups import gradient_norms as groups
from ..groups.group import GroupActor
from ..source import caller_location
from ..step.session import Session, recording
from ..step.values import TracedTensor
from .opaque import opaque


def clip_grad_norm(
    actors: Sequence[ActorHandle], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale the gradients of all actors' parameters so that their norm is at most `max_norm`.

    The norm is taken over all gradients together, as if they were one vector. With all actors in
    one process this is `torch.nn.utils.clip_grad_norm_` on all their parameters, and gives the same
    bits if each of these has a gradient. A parameter that several of the actors hold counts once.
    Call it after `cg.backward`, before the actors' updates. It counts as a write to each actor.

    Args:
        actors: the actors, on any ranks. Their parameters are those of `parameters()`, or, of an
            actor that is no `nn.Module`, all tensors in its attributes that require a gradient.
        max_norm: the norm that gradients may have, above 0.
        norm_type: which norm, from 0; `math.inf` for the largest element. 0 counts, as in torch,
            the parameters with a gradient that is not 0.

    Returns:
        The norm before clipping: a scalar of the type that the parameters have, on the rank of the
        last actor that trains any; 0 if none does.

    Raises:
        TraceError: there are no actors, something else is among them, `max_norm` is not above 0, or
            `norm_type` is below 0.
    """
    session = recording("cg.clip_grad_norm")
    _check(actors, max_norm, norm_type)
    with torch.no_grad():
        holders = Holders(tuple(actor._member for actor in actors))
        norms = [_norms(session, actor, norm_type, holders) for actor in actors]
        # The type of none that trains anything counts; torch's norm of nothing is 0.
        counted = [each for each in norms if each.shape[0]]
        total: Tensor
        if counted:
            total = torch.linalg.vector_norm(torch.cat(counted), norm_type)
        else:
            total = norms[-1].sum()
        # As torch does it, so that the bits are the same.
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        if session is not None and session.optimistic:
            kept = coefficient >= 1.0
            assert isinstance(kept, TracedTensor)
            session.assumptions.append(kept)
            return total
        for actor in actors:
            library_method(actor, scale_gradients)(coefficient, holders)
    return total


def _norms(
    session: Session | None, actor: ActorHandle, norm_type: float, holders: Holders
) -> Tensor:
    """Norms of an actor's gradients, [trained parameters]."""
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
class Holders:
    """The actors whose gradients are clipped, which may hold the same parameters.

    Each parameter counts where one of them has trained it, or else where the first one holds it.
    Where a process plays several ranks, so each rank keeps to the gradients that it would have by
    itself.
    """

    members: tuple[Member, ...]

    @property
    def _groups(self) -> Iterator[GroupActor]:
        return (member.group for member in self.members if member.group is not None)

    def left_to_others(self, actor: Any) -> set[int]:
        """The parameters of a local actor, by identity, that count elsewhere."""
        if any(actor in group.instances.values() for group in self._groups):
            return set()  # an actor on a mesh shares no tensor
        here = [(i, member) for i, member in enumerate(self.members) if member.held]
        at = next(i for i, member in here if member.held[0] is actor)
        left: set[int] = set()
        mine = _ids(_trained(actor)) if len(here) > 1 else left
        for i, member in here:
            common = set() if i == at else mine & _ids(_trained(member.held[0]))
            if common:
                own, other = common & _changed(self.members[at]), common & _changed(member)
                left |= other - own
                left |= common - (own ^ other) if i < at else set()
        return left


def _ids(tensors: Iterable[Tensor]) -> set[int]:
    return {id(tensor) for tensor in tensors}


def _changed(member: Member) -> set[int]:
    """Return what traced functions of a local actor are known to change, or to add gradients to."""
    tensors = reach(member.held).tensors
    return _ids(state.tensor for state in tensors if state.path in member.use.changes)


def _no_norms(actor: Any, norm_type: float, holders: Holders) -> Tensor:
    """Return what `gradient_norms` returns, without elements."""
    dtypes = [parameter.dtype for parameter in _trained(actor)]
    common = reduce(torch.promote_types, dtypes) if dtypes else torch.float32
    return torch.empty(len(dtypes), dtype=common)


@opaque(fake=_no_norms)
def gradient_norms(actor: Any, norm_type: float, holders: Holders) -> Tensor:
    """Norms of gradients, [parameters]; 0 where there is none, or where it counts elsewhere."""
    left = holders.left_to_others(actor)
    norms = [
        p.new_zeros(())
        if p.grad is None or id(p) in left
        else torch.linalg.vector_norm(p.grad, norm_type)
        for p in _trained(actor)
    ]
    return torch.stack(norms) if norms else torch.zeros(0)


@opaque
def scale_gradients(actor: Any, coefficient: Tensor, holders: Holders) -> None:
    """Multiply each gradient that counts here by a scalar."""
    left = holders.left_to_others(actor)
    for parameter in _trained(actor):
        if parameter.grad is not None and id(parameter) not in left:
            parameter.grad.mul_(coefficient.to(parameter.grad.device))
