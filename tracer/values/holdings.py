"""List what actors hold: their memory and the objects that can change, each with its path.

Comparing holdings shows what actors share. A process that plays all ranks holds all actors. If it
does not, the owner of an actor compares it with the constructor's arguments of later actors of
other ranks, while both exist; nothing is kept alive for that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch

from ...ir.location import Location
from .actor_state import ActorState, reach
from .group import GroupActor
from .heap.kinds import is_foreign
from .operators import storage_key


@dataclass
class Holding:
    """Memory and objects that an actor, or anything else, holds at one moment.

    Attributes:
        memory: for each storage, the tensors in it, by path.
        objects: for each object that can change, by identity, its path.
        plain: the keys of objects that are plain data, which a step does not look into: no part of
            a module, nor of a library's object.
        values: the tensors and objects, by path.
    """

    memory: dict[Hashable, dict[str, torch.Tensor]] = field(default_factory=dict)
    objects: dict[Hashable, str] = field(default_factory=dict)
    plain: set[Hashable] = field(default_factory=set)
    values: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(state: ActorState) -> Holding:
        """Sort what a walk has found."""
        holding = Holding()
        for held in state.tensors:
            holding.values.setdefault(held.path, held.tensor)
            for key in _memory_keys(held.tensor):
                holding.memory.setdefault(key, {})[held.path] = held.tensor
        whole = tuple(f"{path}." for obj, path in state.objects if path and _is_whole(obj))
        for obj, path in _changeable(state):
            key = ("object", id(obj))
            holding.objects.setdefault(key, path)
            if not f"{path}.".startswith(whole):
                holding.plain.add(key)
                holding.values.setdefault(path, obj)
        return holding

    @property
    def keys(self) -> frozenset[Hashable]:
        """The keys of all memory and objects."""
        return frozenset((*self.memory, *self.objects))

    def path_of(self, key: Hashable) -> str | None:
        """The path of the memory or object with a key; None if it is not here, or not plain."""
        if key in self.memory:
            return next(iter(self.memory[key]))
        return self.objects.get(key) if key in self.plain else None


def _is_whole(value: Any) -> bool:
    """True if an object is compared as a whole, and not by what it holds."""
    return isinstance(value, torch.nn.Module) or is_foreign(type(value))


def _memory_keys(tensor: torch.Tensor) -> Iterator[Hashable]:
    """Identify the memory of a tensor and of its gradient."""
    key = storage_key(tensor)
    yield ("tensor", id(tensor)) if key is None else ("storage", key)
    if key is not None and (address := tensor.untyped_storage().data_ptr()):
        yield ("address", tensor.device, address)  # two storages may be made of one array
    if tensor.is_leaf and tensor.grad is not None:
        yield from _memory_keys(tensor.grad)


def _changeable(state: ActorState) -> Iterator[tuple[Any, str]]:
    """The Python objects of a state that can change, with their paths."""
    frozen = [obj for obj, _ in state.objects if _is_frozen(obj)]
    fixed = {id(obj) for obj in frozen} | {id(getattr(obj, "__dict__", None)) for obj in frozen}
    for obj, _ in state.objects:
        if isinstance(obj, torch.nn.Module):  # it stands for what torch keeps in it
            attributes = vars(obj)
            fixed.add(id(attributes))
            fixed.update([id(attributes[name]) for name in _OF_MODULES if name in attributes])
    for obj, path in (*state.objects, *state.containers, *state.others):
        if id(obj) not in fixed:
            yield obj, path
    for trainer in state.trainers:
        yield trainer, type(trainer).__name__


_OF_MODULES = tuple(
    name for name, value in vars(torch.nn.Module()).items() if isinstance(value, dict)
)
"""The dicts that every module has."""


def _is_frozen(value: Any) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


@dataclass(frozen=True)
class Held:
    """A tensor or an object that an actor holds.

    Attributes:
        actor, rank: the actor's name and rank.
        made_at: the line of the user's program that made the actor.
        order: how many actors were made before it.
        path: the path of what it holds, from the actor.
    """

    actor: str
    rank: int
    made_at: Location | None
    order: int
    path: str


@dataclass
class Use:
    """How an actor's functions use its memory, which actors of other ranks may hold, too.

    Attributes:
        reads: the paths of the tensors that its traced functions read.
        changes: for each tensor that they change, by path, the function that does.
        is_traced, is_opaque: whether it has methods that were traced, and opaque methods.
        paths: the paths of its tensors, by storage; only while a step is traced.
    """

    reads: set[str] = field(default_factory=set)
    changes: dict[str, str] = field(default_factory=dict)
    is_traced: bool = False
    is_opaque: bool = False
    paths: dict[int | None, str] = field(default_factory=dict)

    def note(
        self, reads: Collection[int | None], changes: Collection[int | None], function: str
    ) -> None:
        """Note the memory that a traced function uses."""
        self.is_traced = True
        self.reads.update(self.paths[key] for key in reads if key in self.paths)
        for key in changes:
            if key in self.paths:
                self.changes.setdefault(self.paths[key], function)

    def of(self, paths: Collection[str]) -> Use:
        """The part that concerns some paths."""
        changes = {path: function for path, function in self.changes.items() if path in paths}
        return Use(self.reads & set(paths), changes, self.is_traced, self.is_opaque)

    def includes(self, path: str) -> bool:
        """True if the actor uses the tensor there; one with opaque methods alone uses them all."""
        only_opaque = self.is_opaque and not self.is_traced
        return only_opaque or path in self.reads or path in self.changes


@dataclass(eq=False)
class Member:
    """An actor, as this process knows it.

    Attributes:
        name, rank: those of its handle.
        world: the world that it was made in.
        held: the instance, in a tuple; empty where another process holds it.
        made_at: the line of the user's program that made it.
        order: how many actors were made before it.
        keys: the keys of what it held when it was made.
        kept: for each constructor's argument that it has kept, by the path in the arguments, its
            own path.
        met: later actors of other ranks whose constructors got what it holds, as (what it holds,
            their name, path in their arguments).
        use: what the functions of earlier steps do to its memory.
        group: the actor on a mesh, if it is one; `rank` is then one of its ranks.
    """

    name: str
    rank: int
    world: object
    held: tuple[Any, ...]
    made_at: Location | None = None
    order: int = 0
    keys: frozenset[Hashable] = frozenset()
    kept: dict[str, str] = field(default_factory=dict)
    met: list[tuple[Held, str, str]] = field(default_factory=list)
    use: Use = field(default_factory=Use)
    group: GroupActor | None = None

    def at(self, path: str) -> Held:
        """Describe what it holds there."""
        return Held(self.name, self.rank, self.made_at, self.order, path)


@dataclass(frozen=True)
class Shared:
    """Memory that an actor shares with another actor of its rank.

    Attributes:
        other: the other actor.
        memory: the storages of the tensors that share memory with the other's.
        objects: the keys of all objects that the other holds, as in `Holding`.
    """

    other: str
    memory: frozenset[int | None]
    objects: frozenset[Hashable] = frozenset()

    def has(self, value: Any) -> bool:
        """True if the other actor holds an object."""
        return ("object", id(value)) in self.objects


class Actors:
    """The actors that a factory has made, for as long as they have handles.

    Args:
        member_of: gives the actor of a handle; None for any other value.
    """

    def __init__(self, member_of: Callable[[Any], Member | None]) -> None:
        self._member_of = member_of
        self._members: WeakValueDictionary[str, Member] = WeakValueDictionary()
        self._count = 0

    def enter(self, member: Member) -> None:
        """Note an actor that has been made."""
        member.order, self._count = self._count, self._count + 1
        self._members[member.name] = member

    def local(self, world: object) -> list[Member]:
        """The actors of a world that this process holds, by name."""
        members = (m for m in self._members.values() if m.held and m.world is world)
        return sorted(members, key=lambda member: member.name)

    def note_given(self, member: Member, arguments: Any) -> None:
        """Note which local actors hold what the constructor of a new actor has got.

        Args:
            member: the new actor.
            arguments: the arguments of its constructor.
        """
        argument_holding = Holding.of(reach(arguments))
        if member.held:
            holding = self.holding(member)
            member.keys = holding.keys
            member.kept = dict(_matches(argument_holding, holding))
        for other in self.local(member.world):
            if other.rank != member.rank and not other.keys.isdisjoint(argument_holding.keys):
                other_holding = self.holding(other)  # as it is now
                for path, own_path in _matches(argument_holding, other_holding):
                    other.met.append((other.at(own_path), member.name, path))

    def holding(self, member: Member) -> Holding:
        """Return what an actor holds now, and what actors of its rank hold whose handles it has."""

        def behind(value: Any) -> tuple[Any, ...]:
            other = self._member_of(value)
            return other.held if other is not None and other.rank == member.rank else ()

        return Holding.of(reach(member.held, behind))


def _matches(first: Holding, second: Holding) -> Iterator[tuple[str, str]]:
    """The paths, in each of two holdings, of what both hold."""
    for key in (*first.memory, *first.objects):
        path, own_path = first.path_of(key), second.path_of(key)
        if path is not None and own_path is not None:
            yield path, own_path
