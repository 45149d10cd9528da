"""Tell which programs of ranks are alike: equal up to names, ranks and channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from ..ops import OP_CLASSES, Collective, Op, PointToPoint, Slice, Value, attribute_names
from ..ops.module import Channel, Program

_OF_RANKS = frozenset({"chan", "group", "peer", "region"})
"""Attributes that tell ranks, and may differ between programs that are alike."""

OF_RANKS = (PointToPoint, Collective, Slice)
"""The ops that have such attributes."""

_COMMUNICATIONS = frozenset(
    cls for cls in OP_CLASSES.values() if issubclass(cls, (PointToPoint, Collective))
)
_channel_of: Callable[[Op], int | None] = attrgetter("chan")

_KEYS: dict[type[Op], Callable[[Op], Any]] = {
    cls: attrgetter(*(name for name in attribute_names(cls) if name not in _OF_RANKS))
    for cls in OP_CLASSES.values()
}


def groups_alike(
    programs: Sequence[Program], channels: Mapping[int, Channel]
) -> Iterator[list[Program]]:
    """Programs that are alike, in groups; each program is in one group.

    Ranks at like positions of meshes have programs that are alike. These have the same ops in the
    same order, with the same attributes and types. Their values correspond one to one, and so do
    their channels, which are declared alike. Only names of values differ, and which peers, groups
    and channels messages have, and which region a slice takes. All of them keep a rule that one
    keeps, if the rule depends on nothing else.
    """
    groups: dict[tuple[int, ...], list[tuple[_Pattern, list[Program]]]] = {}
    for program in programs:
        known = groups.setdefault((len(program.params), len(program.ops)), [])
        for pattern, group in known:
            if pattern.fits(program, channels):
                group.append(program)
                break
        else:
            known.append((_Pattern(program), [program]))
    for known in groups.values():
        yield from (group for _, group in known)


class _Pattern:
    """A program with which others are compared, and the attributes of its ops."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._keys = [_KEYS[type(op)](op) for op in program.ops]

    def fits(self, other: Program, channels: Mapping[int, Channel]) -> bool:
        """True if a program with as many parameters and ops is alike."""
        here: dict[Value, Value] = {}
        if not _correspond(self._program.params, other.params, here):
            return False
        chans: dict[int | None, int | None] = {}
        of = here.get
        for key, op, its in zip(self._keys, self._program.ops, other.ops, strict=True):
            cls = type(op)
            if type(its) is not cls or _KEYS[cls](its) != key:
                return False
            if tuple(map(of, op.operands)) != its.operands:
                return False
            if not _correspond(op.results, its.results, here):
                return False
            if cls in _COMMUNICATIONS:
                chan = _channel_of(its)
                if chans.setdefault(_channel_of(op), chan) != chan:
                    return False
        if len(set(chans.values())) != len(chans) or len(set(here.values())) != len(here):
            return False
        return all(_declared_alike(chan, its, channels) for chan, its in chans.items())


def _correspond(values: Sequence[Value], others: Sequence[Value], here: dict[Value, Value]) -> bool:
    """Note which values correspond; False if their types or numbers differ."""
    if len(values) != len(others):
        return False
    for value, other in zip(values, others, strict=True):
        if value.type is not other.type and value.type != other.type:
            return False
        here[value] = other
    return True


def _declared_alike(chan: int | None, other: int | None, channels: Mapping[int, Channel]) -> bool:
    if chan is None or other is None:
        return chan is other
    one, two = channels.get(chan), channels.get(other)
    if one is None or two is None:
        return False
    return (one.collective, one.via, one.traffic, one.slots, one.slot_bytes) == (
        two.collective,
        two.via,
        two.traffic,
        two.slots,
        two.slot_bytes,
    )
