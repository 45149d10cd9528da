"""Tell which programs of ranks are alike: equal up to names, ranks and channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

from ..layout import Region
from ..ops import OP_CLASSES, Collective, Op, PointToPoint, Slice, Value, attribute_names
from ..ops.module import Channel, Program
from ..types import Place

_OF_RANKS = frozenset({"chan", "group", "peer", "region"})
"""Attributes that tell ranks, and may differ between programs that are alike."""

_KEYS: dict[type[Op], Callable[[Op], Any]] = {
    cls: attrgetter("loc", *(name for name in attribute_names(cls) if name not in _OF_RANKS))
    for cls in OP_CLASSES.values()
}
_MESSAGES = frozenset(cls for cls in OP_CLASSES.values() if issubclass(cls, PointToPoint))
_COLLECTIVES = frozenset(cls for cls in OP_CLASSES.values() if issubclass(cls, Collective))
_ROOTED = frozenset(cls for cls in _COLLECTIVES if "root" in attribute_names(cls))
_root_of: Callable[[Op], int] = attrgetter("root")
_channel_of: Callable[[Op], int | None] = attrgetter("chan")
_message_end: Callable[[Op], tuple[int, int]] = attrgetter("chan", "peer")
_group_end: Callable[[Op], tuple[int | None, Place]] = attrgetter("chan", "group")
_region_of: Callable[[Op], Region] = attrgetter("region")

ChannelEnd: TypeAlias = tuple[int | None, int | Place]
"""A channel of a rank, with the peer or the group of its ops there."""


def end_of(op: Op) -> ChannelEnd | None:
    """The end of a channel that an op is at; None of ops that do not communicate."""
    cls = type(op)
    if cls in _MESSAGES:
        return _message_end(op)
    return _group_end(op) if cls in _COLLECTIVES else None


def move_to_end(op: Op, end: ChannelEnd) -> None:
    """Let an op that communicates be at another end."""
    if isinstance(op, PointToPoint):
        op.chan, op.peer = end  # type: ignore[assignment]
    elif isinstance(op, Collective):
        op.chan, op.group = end  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class RankVariation:
    """The differences of a rank's program from its pattern, each in the pattern's order.

    Attributes:
        rank: the rank.
        names: those of its values.
        ends: those of its channels.
        regions: those of its slices.
    """

    rank: int
    names: tuple[str, ...]
    ends: tuple[ChannelEnd, ...]
    regions: tuple[Region, ...]


class Pattern:
    """A program with which others are compared.

    Programs that are alike have the same ops in the same order, with the same attributes, types
    and lines of the user. Their values correspond one to one, and so do their channels, which are
    declared alike. Only names of values differ, which peers, groups and channels messages have,
    and which region a slice takes.

    Attributes:
        program: the program.
        values: its values, in the order in which they are made.
        ends: its ends of channels, in the order of their first ops.
        slices: its slices.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values: list[Value] = list(program.params)
        self.ends: dict[int | None, ChannelEnd] = {}
        self.slices: list[Slice] = []
        self._keys = [_KEYS[type(op)](op) for op in program.ops]
        self._is_alone = False  # as it has two ends of one channel
        for op in program.ops:
            self.values += op.results
            if (end := end_of(op)) is not None:
                if self.ends.setdefault(end[0], end) != end:
                    self._is_alone = True
            elif isinstance(op, Slice):
                self.slices.append(op)

    @property
    def variation(self) -> RankVariation:
        """That of the program itself."""
        return RankVariation(
            self.program.rank or 0,
            tuple([value.name for value in self.values]),
            tuple(self.ends.values()),
            tuple([piece.region for piece in self.slices]),
        )

    def fit(self, other: Program, channels: Mapping[int, Channel]) -> RankVariation | None:
        """The variation of a program that is alike; None of others.

        Args:
            other: a program with as many parameters and ops.
            channels: those that the module declares.
        """
        here: dict[Value, Value] = {}
        if self._is_alone or not _correspond(self.program.params, other.params, here):
            return None
        ends: dict[int | None, ChannelEnd] = {}
        regions: list[Region] = []
        of = here.get
        for key, op, its in zip(self._keys, self.program.ops, other.ops, strict=True):
            cls = type(op)
            if type(its) is not cls or _KEYS[cls](its) != key:
                return None
            if tuple(map(of, op.operands)) != its.operands:
                return None
            if not _correspond(op.results, its.results, here):
                return None
            if cls is Slice:
                regions.append(_region_of(its))
            elif cls in _MESSAGES or cls in _COLLECTIVES:
                get_end = _message_end if cls in _MESSAGES else _group_end
                end = get_end(its)
                if ends.setdefault(_channel_of(op), end) != end:
                    return None
                if cls in _ROOTED and self._is_root(op) != (_root_of(its) == other.rank):
                    return None
        if not len(set(here.values())) == len(here) == len(self.values):
            return None
        if not _are_like_ends(ends, channels):
            return None
        names = tuple([value.name for value in here.values()])
        return RankVariation(other.rank or 0, names, tuple(ends.values()), tuple(regions))

    def _is_root(self, op: Op) -> bool:
        return _root_of(op) == self.program.rank


def _are_like_ends(ends: Mapping[int | None, ChannelEnd], channels: Mapping[int, Channel]) -> bool:
    """True if channels correspond one to one, and are declared alike."""
    if len({chan for chan, _ in ends.values()}) != len(ends):
        return False
    return all(_declared_alike(chan, its, channels) for chan, (its, _) in ends.items())


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
    first, second = channels.get(chan), channels.get(other)
    if first is None or second is None:
        return False
    return _declaration(first) == _declaration(second)


def _declaration(channel: Channel) -> tuple[object, ...]:
    """The properties of a channel that those of ranks which are alike share."""
    properties = (channel.collective, channel.via, channel.traffic)
    return (*properties, channel.slots, channel.slot_bytes, len(channel.ranks))
