"""Give each rank of a machine its accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ...backends.base import World
from ...backends.device import Device, Fabric
from ...backends.devices import find
from ...backends.devices.pinned_pieces import PinnedPieces
from ...backends.per_world import PerWorld
from ...ir.pipeline.device_speed import DeviceSpeed
from ...passes.placement.fabrics import Fabrics


class Accelerators(Protocol):
    """The part of `torch.accelerator` that is used here."""

    def is_available(self) -> bool:
        """True if the machine has an accelerator that torch can use."""

    def device_count(self) -> int:
        """The number of accelerators that this process can see."""

    def set_device_index(self, device: int, /) -> None:
        """Make one of them this process's current device."""


def bind(accelerators: Accelerators, local_rank: int) -> int | None:
    """Select the device of `local_rank`, for the program's own calls of torch.

    If a launcher shows each rank one device alone, index 0 is right for all. If ranks outnumber
    devices, their programs share the devices in turn. Actors never share one: `for_rank` says on
    which device they live, if on any.

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

    __module__ = "cg"  # the public name, which tracebacks show


@dataclass(frozen=True)
class VisibleDevices:
    """The device that a rank asks for, and those that it can see.

    Attributes:
        wanted: the value of CG_DEVICE.
        kind: of the accelerators that it sees; None if there are none, or it wants none.
        devices: their names, by index; one device has the same name on all ranks of a machine.
    """

    wanted: str
    kind: str | None = None
    devices: tuple[str, ...] = ()


def look(
    wanted: str,
    accelerators: Accelerators,
    present: Callable[[], str | None] = find.present,
    name: Callable[[str, int], str] = find.name,
) -> VisibleDevices:
    """Find the accelerators of this process; a rank that stays on the host finds none.

    A fake accelerator exists wherever a rank asks for it.
    """
    if wanted == find.FAKE:
        return VisibleDevices(wanted, wanted, (name(wanted, 0),))
    kind = None if wanted == HOST else present()
    if kind is None:
        return VisibleDevices(wanted)
    indices = range(accelerators.device_count())
    return VisibleDevices(wanted, kind, tuple(name(kind, index) for index in indices))


def for_rank(
    local_rank: int,
    sights: Sequence[VisibleDevices],
    make: Callable[[str, int], Device] = find.make,
) -> Device | None:
    """The device of a rank. Two ranks never share one.

    `auto` gives each rank of a machine the accelerator of its local rank or, where the launcher
    shows each rank accelerators of its own, the first that it sees. If two ranks would share one,
    all ranks of the machine stay on the host, since ranks that share one cannot send by it.

    Args:
        local_rank: the rank, by its index on its machine.
        sights: of all ranks of the machine, by local rank.
        make: makes the device of a kind and an index.

    Returns:
        The device; None for the host.

    Raises:
        DeviceError: a kind is asked for that the rank does not see, or not often enough.
    """
    sight = sights[local_rank]
    if sight.wanted not in (AUTO, HOST, sight.kind):
        count = len(sight.devices)
        have = f"it has {count} of kind '{sight.kind}'" if sight.kind else "it has none"
        raise DeviceError(
            f"CG_DEVICE={sight.wanted} asks for an accelerator that this machine lacks: {have} "
            f"that cg drives. Kinds that it drives are {', '.join(find.kinds())}; CG_DEVICE=cpu "
            "needs none"
        )
    if sight.kind is None or not sight.devices:
        return None
    index = _own(local_rank, sights)
    if index is None and sight.wanted != AUTO:
        raise DeviceError(f"CG_DEVICE={sight.wanted}: {_shared(sights)}")
    return None if index is None else make(sight.kind, index)


def for_process(
    sight: VisibleDevices,
    current: Callable[[], int],
    make: Callable[[str, int], Device] = find.make,
) -> Device | None:
    """The device of a process that is the only rank: torch's current one; None for the host.

    Args:
        sight: of the process.
        current: gives the index of torch's current device; asked only if there is one.
        make: makes the device of a kind and an index.

    Raises:
        DeviceError: a kind is asked for that the process does not see.
    """

    def take(kind: str, index: int) -> Device:
        return make(kind, index if kind == find.FAKE else current())

    return for_rank(0, [sight], take)


def declined(machines: Iterable[Sequence[VisibleDevices]]) -> str | None:
    """Say why `auto` leaves ranks on the host although they see accelerators; None if it does not.

    Args:
        machines: for each the sights of its ranks, by local rank.
    """
    for sights in machines:
        seeing = [rank for rank, sight in enumerate(sights) if sight.devices]
        is_auto = any(sights[rank].wanted == AUTO for rank in seeing)
        if is_auto and _own(seeing[0], sights) is None:
            return f"CG_DEVICE=auto leaves actors on the host: {_shared(sights)}"
    return None


def _own(local_rank: int, sights: Sequence[VisibleDevices]) -> int | None:
    """The index of a device that no other rank takes; None for all ranks if two would share one.

    All ranks of a machine see the same sights and come to the same choice.
    """
    seeing = {rank: sight.devices for rank, sight in enumerate(sights) if sight.devices}
    for indices in ({rank: rank for rank in seeing}, dict.fromkeys(seeing, 0)):
        taken = [seen[indices[rank]] for rank, seen in seeing.items() if indices[rank] < len(seen)]
        if len(set(taken)) == len(seeing):
            return indices[local_rank]
    return None


def _shared(sights: Sequence[VisibleDevices]) -> str:
    """Say that ranks of a machine would share devices, and what to do."""
    seeing = [sight for sight in sights if sight.devices]
    names = sorted({name for sight in seeing for name in sight.devices})
    return (
        f"{len(seeing)} ranks of one machine would share accelerators. They see {len(names)} in "
        f"all ({', '.join(names)}), of which a rank takes that of its local rank, or else the "
        "first that it sees; and ranks cannot send to each other by one that they share. Start no "
        "more ranks on a machine than it has accelerators, show each rank all of them or one of "
        "its own, or set CG_DEVICE=cpu"
    )


_fabrics: PerWorld[Fabrics | None] = PerWorld()
_pieces: PerWorld[PinnedPieces] = PerWorld()


def fabrics_of(world: World) -> Fabrics | None:
    """The fabrics between the devices of the ranks, for passes; None if no rank has a device.

    The first call is collective.
    """
    return None if world.is_virtual else _fabrics.of(world, partial(_gather, world))


def _gather(world: World) -> Fabrics | None:
    device = world.device
    own = None if device is None else (device.fabric or Fabric("?", frozenset()), device.speed)
    everyone = world.allgather(own)
    if not any(everyone):
        return None
    fabrics = [entry[0] for entry in everyone if entry is not None]
    speed = DeviceSpeed.for_all(entry[1] for entry in everyone if entry is not None)
    reduces = frozenset.intersection(*(fabric.reduces for fabric in fabrics))
    ranks = [entry[0].name if entry is not None else "-" for entry in everyone]
    rendezvous = {fabric.name for fabric in fabrics if fabric.rendezvous}
    return Fabrics("+".join(ranks), _joined(map(str, reduces)), _joined(rendezvous), speed)


def _joined(names: Iterable[str]) -> str:
    return "+".join(sorted(names))


def pinned_memory(world: World, size: int) -> torch.Tensor:
    """So many bytes of the host, u8[size], that the device of this process's rank copies from."""
    device = world.device
    assert device is not None, "only ranks with a device ask for such memory"
    return _pieces.of(world, lambda: PinnedPieces(device)).take(size)


def torch_device(world: World) -> torch.device | None:
    """The device of the tensors of this process's rank; None for the host."""
    return None if world.device is None else world.device.torch_device
