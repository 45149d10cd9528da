"""Find what actors share, and say what their functions do to it.

Two actors of one rank may share a parameter (an optimizer beside its stage), a module, a list.
Their calls then keep an order, as those of one actor do. Of traced functions it is known which
memory they touch; what they read of Python's objects they have read when they were traced. A method
that is called as it is may touch everything. What actors of different ranks share is in `apart.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from ...ir.attributes import NO_SHARES, Effect, Shares
from .holdings import Actors, Held, Holding, Member, Shared, Use
from .interface import Peers
from .operators import (
    storage_key,
)


@dataclass
class Sharing:
    """Things that the actors of a world share, as far as this process knows.

    Attributes:
        together: for each local actor, what it shares with others of its rank.
        memory, objects: what actors of different ranks hold: the holders of each thing; the same on
            all ranks.
        members: the local actors by name.
        holdings: what they hold.
        uses: what notes how they use it.
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
    """Find what the actors of a world share. Collective, where there are other processes."""
    members = actors.local(peers)
    found = Sharing(members={m.name: m for m in members})
    found.holdings = {m.name: actors.holding(m) for m in members}
    common = list(_common(found.holdings))
    found.together = _together(found, common)
    if plays_all(peers):
        _find_apart(found, common)
    else:
        _agree_apart(found, peers)
    found.uses = {name: _use(m, found.holdings[name]) for name, m in found.members.items()}
    return found


def _use(member: Member, holding: Holding) -> Use:
    paths: dict[int | None, str] = {}
    for tensors in holding.memory.values():
        for tensor in tensors.values():
            paths.setdefault(storage_key(tensor), next(iter(tensors)))
    use = member.use
    return replace(use, reads=set(use.reads), changes=dict(use.changes), paths=paths)


def _common(holdings: dict[str, Holding]) -> Iterator[tuple[Hashable, list[str]]]:
    """Return what several actors hold, with their names."""
    holders: dict[Hashable, list[str]] = {}
    for name, holding in holdings.items():
        for key in (*holding.memory, *holding.objects):
            holders.setdefault(key, []).append(name)
    return ((key, names) for key, names in holders.items() if len(names) > 1)


def _together(
    found: Sharing, common: Iterable[tuple[Hashable, list[str]]]
) -> dict[str, tuple[Shared, ...]]:
    rank = {name: member.rank for name, member in found.members.items()}
    memory: dict[str, dict[str, set[int | None]]] = {}
    for key, names in common:
        for one in names:
            mine = found.holdings[one].memory.get(key, {}).values()
            for other in names:
                if other != one and rank[other] == rank[one]:
                    known = memory.setdefault(one, {}).setdefault(other, set())
                    known.update(map(storage_key, mine))
    return {
        one: tuple(Shared(other, frozenset(keys)) for other, keys in sorted(others.items()))
        for one, others in memory.items()
    }


def _find_apart(found: Sharing, common: Iterable[tuple[Hashable, list[str]]]) -> None:
    """Find what actors of different ranks hold, where this process has all actors."""
    seen = set()
    for key, names in common:
        paths = [(name, found.holdings[name].path_of(key)) for name in names]
        held = tuple(found.members[name].at(path) for name, path in paths if path is not None)
        if len({each.rank for each in held}) > 1 and held not in seen:
            seen.add(held)
            is_memory = all(key in found.holdings[name].memory for name in names)
            (found.memory if is_memory else found.objects).append(held)


def _agree_apart(found: Sharing, peers: Peers) -> None:
    """Find the same among processes, which tell each other what their actors were made of."""
    mine = [(*met, _is_memory(found, met[0])) for m in found.members.values() for met in m.met]
    met = [each for theirs in peers.allgather(mine) for each in theirs]
    if not met:
        return
    answers = {
        (name, path): found.members[name].at(found.members[name].kept[path])
        for _, name, path, _ in met
        if name in found.members and path in found.members[name].kept
    }
    kept = {key: held for theirs in peers.allgather(answers) for key, held in theirs.items()}
    for held, name, path, is_memory in met:
        other = kept.get((name, path))
        if other is not None:
            (found.memory if is_memory else found.objects).append((held, other))


def _is_memory(found: Sharing, held: Held) -> bool:
    keys = found.holdings[held.actor].memory.values()
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
    found: dict[str, Effect] = {}
    for each in shared:
        if not each.memory.isdisjoint(changes):
            found[each.other] = effect
        elif not each.memory.isdisjoint(reads):
            found[each.other] = Effect.READ
    return Shares.of(found) if found else NO_SHARES
