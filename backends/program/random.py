"""Seeds for the calls that draw random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..base import Body
from ..device import Device

_MASK = (1 << 64) - 1


def splitmix64(x: int) -> int:
    """One step of splitmix64: a bijection of 64-bit integers that scatters close inputs.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def call_seeds(seed: int, key: int) -> Callable[[int], int]:
    """The generator's seed for a call, by execution: `mix(mix(mix(seed) ^ execution) ^ key)`.

    `mix` is `splitmix64`. The result does not depend on the rank, the schedule, or what else was
    drawn. `seed` counts modulo 2**64.
    """
    base = splitmix64(seed & _MASK)
    return lambda execution: splitmix64(splitmix64(base ^ execution) ^ key)


def seeded(body: Body, seed: int, key: int, execution: Callable[[], int]) -> Body:
    """`body` with torch's CPU generator seeded before it and put back after it.

    `execution` returns the number of the execution that a call belongs to.
    """
    generator = torch.default_generator
    seed_of = call_seeds(seed, key)

    def run(*inputs: Any) -> Any:
        before = generator.get_state()
        generator.manual_seed(seed_of(execution()))
        try:
            return body(*inputs)
        finally:
            generator.set_state(before)

    return run


def seeded_on(
    device: Device, body: Body, seed: int, key: int, execution: Callable[[], int]
) -> Body:
    """`body` with a device's generator seeded before it and put back after it; see `seeded`."""
    seed_of = call_seeds(seed, key)

    def run(*inputs: Any) -> Any:
        before = device.random_state()
        device.seed(seed_of(execution()))
        try:
            return body(*inputs)
        finally:
            device.set_random_state(before)

    return run
