"""Cut large buffers of pinned memory out of pieces whose sizes are powers of two.

Torch's allocator rounds each buffer up to a power of two: one of 1.3 GiB takes 2 GiB of the host's
memory. To pin memory takes a second for some GB, so what is lost costs time, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import Device

SMALL = 1 << 20
"""The bytes below which a buffer has a piece of its own."""

_ALIGNED = 4096
"""Buffers begin at multiples of so many bytes, as pages do."""

_GROWTH = (1, 2, 4, 8)
"""How much larger than its first buffer a piece may be."""


class PinnedPieces:
    """Pinned memory of one device; a piece lives for as long as one of its buffers.

    Pieces grow with what has been taken: the memory that lies idle behind the last buffer is never
    more than what is used, as with torch's allocator.

    Args:
        device: the device that copies to and from the memory.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._taken = 0

    def take(self, size: int) -> Tensor:
        """So many bytes that nobody else has, u8[size]."""
        if size < SMALL:
            return _bytes(self._device, size)
        room = -(-size // _ALIGNED) * _ALIGNED
        if room > self._rest.numel():
            self._rest = _bytes(self._device, self._piece(room))
        buffer, self._rest = self._rest[:size], self._rest[room:]
        self._taken += room
        return buffer

    def _piece(self, room: int) -> int:
        """The size of a new piece: of those that are not too large the one that loses the least."""
        least = 1 << (room - 1).bit_length()
        sizes = [least * factor for factor in _GROWTH]
        fitting = [size for size in sizes if size <= max(least, self._taken)]
        return min(fitting, key=lambda size: (size % room / size, size))


def _bytes(device: Device, size: int) -> Tensor:
    return device.host_buffer(torch.empty(size, dtype=torch.uint8, device="meta"))
