"""The kinds of accelerators that cg drives, and which of them this machine has."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from ..device import Device
from ..fake import device as fake
from ..fake.host_memory import KIND
from . import cuda, npu

FAKE = KIND
"""Each process has a fake device of its own, which is used only where it is asked for."""

MAKERS: dict[str, Callable[[int], Device]] = {
    "cuda": cuda.make,
    "npu": npu.make,
    FAKE: fake.make,
}
"""The functions that make devices, by torch's name for their kind."""


def kinds() -> tuple[str, ...]:
    """All kinds that cg drives."""
    return tuple(sorted(MAKERS))


def present() -> str | None:
    """The kind of this machine's accelerators; None if it has none that cg drives."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return (
        accelerator.type
        if accelerator is not None and accelerator.type in MAKERS.keys() - {FAKE}
        else None
    )


def name(kind: str, index: int) -> str:
    """A name that no other device of the machine has, whichever devices a process can see.

    Where torch gives no UUID, the name is the device's index in this process. Two processes that
    see one device each then seem to see the same device.
    """
    if kind == FAKE:
        return f"the one of process {os.getpid()}"
    properties = getattr(torch.get_device_module(kind), "get_device_properties", None)
    uuid = getattr(properties(index), "uuid", None) if properties is not None else None
    return f"number {index}, which torch does not name" if uuid is None else str(uuid)


def make(kind: str, index: int) -> Device:
    """The device of a kind, as this process's current one."""
    return MAKERS[kind](index)
