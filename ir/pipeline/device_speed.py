"""What is assumed of a device of a kind, where nothing is measured: its speed, and its link."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..flops import WORK_OF_MILLISECOND
from .costs import Costs, Link

_LATENCY = 0.01
"""Of a copy between a device and its host, in milliseconds."""

# Products of matrices in bfloat16 (in float16 before 2020) at their best, in operations of a
# millisecond; and GB/s to the host in one direction, of the bus that boards of this name have.
_KNOWN = {
    "V100": (1.1e11, 12.0),
    "A100": (2.6e11, 25.0),
    "A800": (2.6e11, 25.0),
    "A10": (1e11, 25.0),
    "A40": (1.3e11, 25.0),
    "L4": (1e11, 25.0),
    "L40": (1.6e11, 25.0),
    "L40S": (3e11, 25.0),
    "4090": (1.7e11, 25.0),
    "5090": (2.2e11, 50.0),
    "H20": (1.4e11, 50.0),
    "H100": (7e11, 50.0),
    "H800": (7e11, 50.0),
    "H200": (7e11, 50.0),
    "GH200": (7e11, 300.0),
    "B100": (1.5e12, 50.0),
    "B200": (1.7e12, 50.0),
    "B300": (1.7e12, 50.0),
    "GB200": (1.8e12, 300.0),
    "GB300": (1.8e12, 300.0),
}


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """The speed of a device, and the link to its host.

    A choice of memory hides copies behind computation. So the speed is one that computation does
    not exceed: copies that are too slow delay a step by more than too few of them do.

    Attributes:
        work: floating-point operations of a millisecond.
        host: the link, for each direction.
    """

    work: float = WORK_OF_MILLISECOND
    host: Link = field(default_factory=lambda: Costs().host)

    @staticmethod
    def named(name: str) -> DeviceSpeed:
        """That of a device by the name that its driver gives, such as `NVIDIA H200`."""
        words = name.replace("-", " ").split()
        known = next((_KNOWN[word] for word in words if word in _KNOWN), None)
        return DeviceSpeed() if known is None else DeviceSpeed(known[0], Link(_LATENCY, known[1]))

    @staticmethod
    def for_all(speeds: Iterable[DeviceSpeed]) -> DeviceSpeed:
        """One for several devices: with it copies hide on each of them."""
        listed = list(speeds)
        slowest = min((speed.host for speed in listed), key=lambda link: link.bandwidth)
        return DeviceSpeed(max(speed.work for speed in listed), slowest)
