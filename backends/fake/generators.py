"""Generators of random numbers on the fake device.

Torch makes no generator for a device that it does not know. A `FakeGenerator` is a generator of the
host that says that it is on the device. Numbers that are drawn without a generator come from the
host's own, so they are those of the same program on the host.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .host_memory import DEVICE_INDEX, KIND


class FakeGenerator(torch._C.Generator):
    """A generator of the device."""

    def __init__(self) -> None:
        super().__init__()
        number = self._cdata  # type: ignore[attr-defined]
        _numbers.add(number)
        weakref.finalize(self, _numbers.discard, number)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(KIND, DEVICE_INDEX)


_numbers: set[int] = set()
"""Torch's numbers of the generators that exist; kernels are given other objects for them."""


def device_type(generator: torch._C.Generator) -> str:
    """The kind of device that a generator, as a kernel is given it, is on."""
    is_there = generator._cdata in _numbers  # type: ignore[attr-defined]
    return KIND if is_there else generator.device.type


def take_generators() -> None:
    """Let `torch.Generator("fake")` make a `FakeGenerator`."""
    host: Any = torch._C.Generator

    class OfAnyDevice(type):
        def __call__(cls, device: Any = "cpu") -> torch.Generator:
            if torch.device(device).type == KIND:
                return FakeGenerator()
            return host(device)  # type: ignore[no-any-return]

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, host)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, host)

    words = {"__doc__": host.__doc__, "__module__": "torch"}
    torch.Generator = OfAnyDevice("Generator", (), words)  # type: ignore[assignment, misc]
