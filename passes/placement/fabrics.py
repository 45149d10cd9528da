"""Fabrics: the ranks that have devices, and the transports that join these."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.ops.module import Channel, Module
from ...ir.types import DType, Place

HOST = "cpu"
"""The transport between hosts, which carries everything."""


def is_by_stream(channel: Channel) -> bool:
    """True if a channel's messages go by what joins devices."""
    return not channel.is_by_host


def one_by_one(module: Module, rendezvous: str) -> frozenset[int]:
    """The channels whose messages a rank does one after the other; `rendezvous` as in `Fabrics`."""
    fabrics = Fabrics(rendezvous=rendezvous)
    edges = (channel for channel in module.channels.values() if not channel.collective)
    return frozenset(channel.id for channel in edges if fabrics.is_one_by_one(channel))


@dataclass(frozen=True)
class Fabrics:
    """The transports between devices, in the text form that options of passes have.

    Attributes:
        ranks: for each rank, with `+` between them, the transport that joins its device to others
            that have the same one; `-` for a rank without a device. Empty where none has any.
        reduces: the element types that these transports reduce, with `+` between them.
        rendezvous: those of these transports, with `+` between them, that do the messages of a rank
            one after the other, each when its other end has come.
    """

    ranks: str = ""
    reduces: str = ""
    rendezvous: str = ""

    def of_rank(self, rank: int) -> str | None:
        """The transport of a rank's device, if it has one."""
        names = self.ranks.split("+")
        return None if rank >= len(names) or names[rank] in ("", "-") else names[rank]

    def joining(self, place: Place) -> str | None:
        """The transport that joins the devices of all ranks of a place, if there is one."""
        first = self.of_rank(place.ranks[0])
        return first if all(self.of_rank(rank) == first for rank in place.ranks) else None

    def bare(self, place: Place) -> tuple[int, ...]:
        """The ranks of a place that have no device."""
        return tuple(rank for rank in place.ranks if self.of_rank(rank) is None)

    def knows(self, name: str) -> bool:
        """True if any device is joined to others by a transport of that name."""
        return name in self.ranks.split("+")

    def is_one_by_one(self, channel: Channel) -> bool:
        """True if a rank does the operations of a channel's transport one after the other."""
        return channel.via is not None and channel.via in self.rendezvous.split("+")

    def can_reduce(self, dtype: DType) -> bool:
        """True if the transports reduce elements of a type."""
        return dtype.value in self.reduces.split("+")
