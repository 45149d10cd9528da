"""Gives each rank of a machine its accelerator."""

from __future__ import annotations

from typing import Protocol


class Accelerators(Protocol):
    """The part of `torch.accelerator` that is used here."""

    def is_available(self) -> bool:
        """Whether the machine has an accelerator that torch can use."""

    def device_count(self) -> int:
        """How many this process can see."""

    def set_device_index(self, device: int, /) -> None:
        """Make one of them this process's current device."""


def bind(accelerators: Accelerators, local_rank: int) -> int | None:
    """Select the device of `local_rank`.

    A launcher that shows each rank one device alone has chosen already: index 0 is then right
    for all. Where ranks outnumber devices, they share them in turn.

    Returns:
        The device's index; None where there is no accelerator.
    """
    if not accelerators.is_available() or (count := accelerators.device_count()) < 1:
        return None
    index = local_rank % count
    accelerators.set_device_index(index)
    return index
