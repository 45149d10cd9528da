"""What actors hold in common: found by walking all that each of them holds.

Two actors of one rank may share a parameter (an optimizer beside its stage), a module, a list.
Their calls then keep an order, as those of one actor do. Of traced functions it is known which
memory they touch; what they read of Python's objects they have read when they were traced. A method
that is called as it is may touch everything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..ir.attributes import NO_SHARES, Effect, Shares
from .guards import storage_key
from .lifting import ActorState, reach


@dataclass(frozen=True)
class Shared:
    """What an actor shares with another actor of its rank.

    Attributes:
        other: the other actor.
        memory: the storages of the tensors that share memory with the other's.
    """

    other: str
    memory: frozenset[int | None]


@dataclass(eq=False)
class Member:
    """An actor, as this process knows it.

    Attributes:
        name, rank: as those of its handle.
        world: what it was made in.
        held: in a tuple the instance; empty where another process holds it.
    """

    name: str
    rank: int
    world: object
    held: tuple[Any, ...]


class Actors:
    """The actors that a factory has made, for as long as they have handles.

    Args:
        member_of: the actor that a value is a handle of; None of any other value.
    """

    def __init__(self, member_of: Callable[[Any], Member | None]) -> None:
        self._member_of = member_of
        self._members: WeakValueDictionary[str, Member] = WeakValueDictionary()

    def enter(self, member: Member) -> None:
        """Note an actor that has been made."""
        self._members[member.name] = member

    def sharing(self, world: object) -> dict[str, tuple[Shared, ...]]:
        """For each actor of this process that shares state with others of its rank, with whom."""
        members = (m for m in self._members.values() if m.held and m.world is world)
        local = sorted(members, key=lambda member: member.name)
        holdings = {member.name: self._holding(member) for member in local}
        ranks = {member.name: member.rank for member in local}
        found: dict[str, dict[str, set[int | None]]] = {}
        for names in _common(holdings):
            for one, key in names.items():
                for other in names:
                    if other != one and ranks[other] == ranks[one]:
                        memory = found.setdefault(one, {}).setdefault(other, set())
                        memory.update(holdings[one].memory.get(key, ()))
        return {
            one: tuple(Shared(other, frozenset(memory)) for other, memory in others.items())
            for one, others in found.items()
        }

    def _holding(self, member: Member) -> _Holding:
        """What an actor holds; of other actors of its rank whose handles it has, too."""

        def behind(value: Any) -> tuple[Any, ...]:
            other = self._member_of(value)
            return other.held if other is not None and other.rank == member.rank else ()

        return _Holding.of(reach(member.held, behind))


def _common(holdings: dict[str, _Holding]) -> Iterator[dict[str, Hashable]]:
    """For each thing that several actors hold: the actors, each with the thing's key."""
    holders: dict[Hashable, list[str]] = {}
    for name, holding in holdings.items():
        for key in (*holding.memory, *holding.objects):
            holders.setdefault(key, []).append(name)
    for key, names in holders.items():
        if len(names) > 1:
            yield dict.fromkeys(names, key)


@dataclass
class _Holding:
    """What an actor holds.

    Attributes:
        memory: for each piece of memory, the storages of the tensors that it is of.
        objects: identities of the objects that can change.
    """

    memory: dict[Hashable, set[int | None]] = field(default_factory=dict)
    objects: set[Hashable] = field(default_factory=set)

    @staticmethod
    def of(state: ActorState) -> _Holding:
        holding = _Holding()
        for held in state.tensors:
            tensor = held.tensor
            for key in _memory_keys(tensor):
                holding.memory.setdefault(key, set()).add(storage_key(tensor))
        holding.objects.update(("object", id(each)) for each in _changeable(state))
        return holding


def _memory_keys(tensor: torch.Tensor) -> Iterator[Hashable]:
    """What identifies the memory of a tensor and of its gradient."""
    key = storage_key(tensor)
    yield ("tensor", id(tensor)) if key is None else ("storage", key)
    if key is not None and (address := tensor.untyped_storage().data_ptr()):
        yield ("address", tensor.device, address)  # two storages may be made of one array
    if tensor.is_leaf and tensor.grad is not None:
        yield from _memory_keys(tensor.grad)


def _changeable(state: ActorState) -> Iterator[Any]:
    """The Python objects of a state that can change."""
    frozen = [each for each, _ in state.objects if _is_frozen(each)]
    fixed = {id(each) for each in frozen} | {id(getattr(each, "__dict__", None)) for each in frozen}
    for each, _ in (*state.objects, *state.containers, *state.others):
        if id(each) not in fixed:
            yield each
    yield from state.trainers


def _is_frozen(value: Any) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def shares_of(
    shared: Iterable[Shared],
    effect: Effect,
    reads: Collection[int | None],
    changes: Collection[int | None],
) -> Shares:
    """What a traced function does to state that its actor shares.

    Args:
        shared: what the actor shares.
        effect: the function's effect on its actor.
        reads, changes: the memory that it reads, and that it writes to or accumulates into.
    """
    found: dict[str, Effect] = {}
    for each in shared:
        if not each.memory.isdisjoint(changes):
            found[each.other] = effect
        elif not each.memory.isdisjoint(reads):
            found[each.other] = Effect.READ
    return Shares.of(found) if found else NO_SHARES


def shares_of_opaque(shared: Iterable[Shared]) -> Shares:
    """The same of a method that is called as it is."""
    return Shares.of({each.other: Effect.WRITE for each in shared})
