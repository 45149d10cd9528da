"""Gives each rank of a machine its accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from ..backends.base import World
from ..backends.devices import find
from ..backends.devices.base import Device, Fabric
from ..passes.fabrics import Fabrics


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


AUTO, HOST = "auto", "cpu"


class DeviceError(RuntimeError):
    """The ranks cannot have the devices that CG_DEVICE asks for."""


def for_rank(
    wanted: str,
    local_rank: int,
    local_size: int,
    accelerators: Accelerators,
    present: Callable[[], str | None] = find.present,
    make: Callable[[str, int], Device] = find.make,
) -> Device | None:
    """The device of a rank, by the value of CG_DEVICE.

    `auto` gives each rank of a machine the accelerator of its local rank, if there are as many as
    ranks (or if the launcher shows each rank one of its own), and leaves the ranks on the host
    otherwise: ranks that share an accelerator cannot send to each other by it.

    Raises:
        DeviceError: a kind is asked for that this machine does not have, or not often enough.
    """
    if wanted == HOST:
        return None
    kind = present()
    count = accelerators.device_count() if kind is not None else 0
    if wanted not in (AUTO, kind):
        have = f"it has {count} of kind '{kind}'" if kind else "it has none that cg drives"
        raise DeviceError(
            f"CG_DEVICE={wanted} asks for an accelerator that this machine lacks: {have}. Kinds "
            f"that cg drives are {', '.join(find.kinds())}; CG_DEVICE=cpu needs none"
        )
    if kind is None:
        return None
    if local_size > count:
        if wanted == AUTO:
            return None
        raise DeviceError(
            f"CG_DEVICE={wanted}: {local_size} ranks of this machine would share {count} devices, "
            "and devices that ranks share cannot send to each other. Start fewer ranks, or set "
            "CG_DEVICE=cpu"
        )
    return make(kind, local_rank)


_fabrics: WeakKeyDictionary[World, Fabrics | None] = WeakKeyDictionary()


def fabrics_of(world: World) -> Fabrics | None:
    """What joins the devices of the ranks, as passes know it; None where no rank has a device.

    The first call is collective.
    """
    if world.is_virtual:
        return None
    if world not in _fabrics:
        _fabrics[world] = _gather(world)
    return _fabrics[world]


def _gather(world: World) -> Fabrics | None:
    device = world.device
    mine = None
    if device is not None:
        fabric = device.fabric
        mine = fabric or Fabric("?", frozenset())
    everyone = world.allgather(mine)
    if not any(everyone):
        return None
    found = [each for each in everyone if each is not None]
    reduces = frozenset.intersection(*(each.reduces for each in found))
    ranks = [each.name if each is not None else "-" for each in everyone]
    rendezvous = {each.name for each in found if each.rendezvous}
    return Fabrics("+".join(ranks), _joined(map(str, reduces)), _joined(rendezvous))


def _joined(names: Iterable[str]) -> str:
    return "+".join(sorted(names))


def torch_device(world: World) -> torch.device | None:
    """Where the tensors of this process's rank are; None for the host."""
    return None if world.device is None else world.device.torch_device
