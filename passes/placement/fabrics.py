"""Describe which ranks have devices, and which transports join the devices."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...ir.ops.module import Channel, Module
from ...ir.pipeline.device_speed import DeviceSpeed
from ...ir.types import DType, Place

HOST = "cpu"
"""The transport between hosts, which carries everything."""


def is_by_stream(channel: Channel) -> bool:
    """True if a channel's messages go from device to device, by a stream."""
    return not channel.is_by_host


def one_by_one(module: Module, rendezvous: str) -> frozenset[int]:
    """The channels between two ranks whose transport does a rank's messages one after the other.

    Args:
        module: the module with the channels.
        rendezvous: as in `Fabrics`.
    """
    fabrics = Fabrics(rendezvous=rendezvous)
    edges = (channel for channel in module.channels.values() if not channel.collective)
    return frozenset(channel.id for channel in edges if fabrics.is_one_by_one(channel))


@dataclass(frozen=True)
class Fabrics:
    """The transports between devices, in the text form of passes' options.

    Attributes:
        ranks: for each rank the transport of its device, with `+` between ranks; `-` for a rank
            without a device. A transport joins all devices that have it. Empty: no rank has a
            device.
        reduces: the element types that these transports reduce, with `+` between them.
        rendezvous: the transports, with `+` between them, that do the messages of a rank one after
            the other, each once its other end is posted.
        speed: what is assumed of all devices, where nothing is measured.
    """

    ranks: str = ""
    reduces: str = ""
    rendezvous: str = ""
    speed: DeviceSpeed = field(default_factory=DeviceSpeed)

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
        """True if any rank's device has the transport with this name."""
        return name in self.ranks.split("+")

    def is_one_by_one(self, channel: Channel) -> bool:
        """True if the transport of a channel does a rank's operations one after the other."""
        return channel.via is not None and channel.via in self.rendezvous.split("+")

    def can_reduce(self, dtype: DType) -> bool:
        """True if the transports can reduce tensors of an element type."""
        return dtype.value in self.reduces.split("+")
