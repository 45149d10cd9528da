"""The messages that go back and forth to measure an edge."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest

from cg.backends.nccl.pool import width_of
from cg.ir.flops import Flops
from cg.ir.ops.module import Channel, Module
from cg.ir.types import DType
from cg.launch.measure.link_benchmark import _one_way


@dataclass
class World:
    """The part of a world that a trial uses."""

    size: int = 2
    device: object = None
    is_virtual: bool = True


class _Seen(Exception):
    """Ends a trial where it would be run."""


def tried(*channels: Channel, largest: int = 64) -> Module:
    """The module that two ranks with these channels would run, with messages of so many bytes."""
    patched = mock.patch("cg.launch.measure.link_benchmark.record", side_effect=_Seen)
    with patched as record, pytest.raises(_Seen):
        _one_way(World(), (0, 1), largest, channels)  # type: ignore[arg-type]
    (call,) = record.call_args_list
    module = call.args[1].module
    assert isinstance(module, Module)
    return module


def products(count: int) -> Flops:
    return Flops.of({DType.BF16: count})


def channels_of(module: Module) -> dict[tuple[int, ...], tuple[Flops | None, int | None]]:
    return {one.ranks: (one.background, one.slot_bytes) for one in module.channels.values()}


def test_messages_of_a_trial_are_those_of_a_step_that_waits() -> None:
    assert {background for background, _ in channels_of(tried()).values()} == {None}
    plain = Channel(7, (0, 1), slot_bytes=4096)
    assert channels_of(tried(plain)) == channels_of(tried())


def test_messages_in_the_background_keep_what_they_occupy() -> None:
    one = Channel(7, (1, 0), slot_bytes=1 << 24, background=products(10**12))
    elsewhere = Channel(8, (2, 1), slot_bytes=1 << 24, background=products(10**13))
    found = channels_of(tried(one, elsewhere))
    assert found[1, 0] == (products(10**12), 1 << 24)
    assert found[0, 1] == channels_of(tried())[0, 1]


@pytest.mark.parametrize("nbytes", [64, 1 << 20, 1 << 24, 1 << 26])
@pytest.mark.parametrize("background", [10**6, 10**9, 10**12])
def test_they_occupy_as_many_multiprocessors(nbytes: int, background: int) -> None:
    one = Channel(7, (0, 1), slot_bytes=nbytes, background=products(background))
    for largest in (64, max(nbytes, 1 << 18)):
        (found,) = [c for c in tried(one, largest=largest).channels.values() if c.ranks == (0, 1)]
        assert found.slot_bytes is not None
        assert found.slot_bytes >= 64
        assert width_of(found) == width_of(one)
