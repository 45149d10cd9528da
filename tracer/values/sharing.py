"""Find what actors share, and say what their functions do to it.

Two actors of one rank may share a parameter (an optimizer beside its stage), a module, a list.
Their calls then keep an order, like the calls of one actor. A traced function touches memory that
is known, and has read Python's objects when it was traced. An opaque method may touch everything.
`apart.py` checks what actors of different ranks share.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from ...ir.attributes import NO_SHARES, Effect, Shares
from .holdings import Actors, Held, Holding, Member, Shared, Use
from .interface import Peers
from .operators import storage_key


@dataclass
class Sharing:
    """State that the actors of a world share, as far as this process knows.

    Attributes:
        together: for each local actor, what it shares with others of its rank.
        memory, objects: the holders of each storage, and of each object, that actors of different
            ranks hold; the same on all ranks.
        members: the local actors by name.
        holdings: what they hold.
        uses: notes of how they use it.
    """

    together: dict[str, tuple[Shared, ...]] = field(default_factory=dict)
    memory: list[tuple[Held, ...]] = field(default_factory=list)
    objects: list[tuple[Held, ...]] = field(default_factory=list)
    members: dict[str, Member] = field(default_factory=dict)
    holdings: dict[str, Holding] = field(default_factory=dict)
    uses: dict[str, Use] = field(default_factory=dict)


def plays_all(peers: Peers) -> bool:
    """True if this process plays all ranks."""
    return all(peers.plays(rank) for rank in range(peers.size))


def find_sharing(actors: Actors, peers: Peers) -> Sharing:
    """Find what the actors of a world share. It is collective if there are other processes."""
    members = actors.local(peers)
    sharing = Sharing(members={m.name: m for m in members})
    sharing.holdings = {m.name: actors.holding(m) for m in members}
    common = list(_common(sharing.holdings))
    sharing.together = _together(sharing, common)
    if plays_all(peers):
        _find_apart(sharing, common)
    else:
        _agree_apart(sharing, peers)
    sharing.uses = {name: _use(m, sharing.holdings[name]) for name, m in sharing.members.items()}
    return sharing


def _use(member: Member, holding: Holding) -> Use:
    paths: dict[int | None, str] = {}
    for tensors in holding.memory.values():
        for tensor in tensors.values():
            paths.setdefault(storage_key(tensor), next(iter(tensors)))
    use = member.use
    return replace(use, reads=set(use.reads), changes=dict(use.changes), paths=paths)


def _common(holdings: dict[str, Holding]) -> Iterator[tuple[Hashable, list[str]]]:
    """Return the keys of what several actors hold, with the actors' names."""
    holders: dict[Hashable, list[str]] = {}
    for name, holding in holdings.items():
        for key in (*holding.memory, *holding.objects):
            holders.setdefault(key, []).append(name)
    return ((key, names) for key, names in holders.items() if len(names) > 1)


def _together(
    sharing: Sharing, common: Iterable[tuple[Hashable, list[str]]]
) -> dict[str, tuple[Shared, ...]]:
    rank = {name: member.rank for name, member in sharing.members.items()}
    memory: dict[str, dict[str, set[int | None]]] = {}
    for key, names in common:
        for name in names:
            tensors = sharing.holdings[name].memory.get(key, {}).values()
            for other_name in names:
                if other_name != name and rank[other_name] == rank[name]:
                    known = memory.setdefault(name, {}).setdefault(other_name, set())
                    known.update(map(storage_key, tensors))
    return {
        name: tuple(
            Shared(other_name, frozenset(keys), frozenset(sharing.holdings[other_name].objects))
            for other_name, keys in sorted(others.items())
        )
        for name, others in memory.items()
    }


def _find_apart(sharing: Sharing, common: Iterable[tuple[Hashable, list[str]]]) -> None:
    """Find what actors of different ranks hold, where this process has all actors."""
    seen = set()
    for key, names in common:
        paths = [(name, sharing.holdings[name].path_of(key)) for name in names]
        held = tuple(sharing.members[name].at(path) for name, path in paths if path is not None)
        if len({holder.rank for holder in held}) > 1 and held not in seen:
            seen.add(held)
            is_memory = all(key in sharing.holdings[name].memory for name in names)
            (sharing.memory if is_memory else sharing.objects).append(held)


def _agree_apart(sharing: Sharing, peers: Peers) -> None:
    """Find the same among processes, which exchange what their actors' constructors got."""
    own_records = [
        (*met, _is_memory(sharing, met[0])) for m in sharing.members.values() for met in m.met
    ]
    met = [record for records in peers.allgather(own_records) for record in records]
    if not met:
        return
    answers = {
        (name, path): sharing.members[name].at(sharing.members[name].kept[path])
        for _, name, path, _ in met
        if name in sharing.members and path in sharing.members[name].kept
    }
    all_answers = {
        key: held
        for process_answers in peers.allgather(answers)
        for key, held in process_answers.items()
    }
    for held, name, path, is_memory in met:
        other = all_answers.get((name, path))
        if other is not None:
            (sharing.memory if is_memory else sharing.objects).append((held, other))


def _is_memory(sharing: Sharing, held: Held) -> bool:
    keys = sharing.holdings[held.actor].memory.values()
    return any(held.path in tensors for tensors in keys)


def shares_of(
    shared: Iterable[Shared],
    effect: Effect,
    reads: Collection[int | None],
    changes: Collection[int | None],
) -> Shares:
    """Say what a traced function does to state that its actor shares.

    Args:
        shared: what the actor shares.
        effect: the function's effect on its actor.
        reads, changes: the memory that it reads, and that it writes to or accumulates into.
    """
    effects: dict[str, Effect] = {}
    for share in shared:
        if not share.memory.isdisjoint(changes):
            effects[share.other] = effect
        elif not share.memory.isdisjoint(reads):
            effects[share.other] = Effect.READ
    return Shares.of(effects) if effects else NO_SHARES
