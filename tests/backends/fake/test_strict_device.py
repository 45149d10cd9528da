"""A strict device waits for all that it has to do wherever a driver may."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from cg.backends.fake.device import FakeDevice
from cg.ir.attributes import Stream


def _idle() -> None:
    pass


CALLS: dict[str, Callable[[FakeDevice], object]] = {
    "operation": lambda device: torch.ones(2, device="fake"),
    "buffer": lambda device: device.host_buffer(torch.ones(2)),
    "stream": lambda device: device.stream(Stream.GATHER),
    "capture": lambda device: device.capture(_idle, device.stream(Stream.COMPUTE)),
    "memory": lambda device: device.give_back(),
}


def begin(device: FakeDevice) -> threading.Event:
    """Put on a stream what ends when the event is set."""
    gate = threading.Event()
    device.stream(Stream.RECV).put("recv", lambda: gate.wait(60))
    return gate


def is_held_up(device: FakeDevice, call: Callable[[], object]) -> bool:
    """True if a call ends only when what is on the device has ended."""
    gate, over = begin(device), threading.Event()

    def run() -> None:
        with device.session():
            call()
        over.set()

    thread = threading.Thread(target=run)
    thread.start()
    ended_alone = over.wait(0.3)
    gate.set()
    thread.join(60)
    assert over.is_set()
    return not ended_alone


@pytest.mark.parametrize("name", CALLS)
def test_a_strict_device_holds_the_host_up(name: str) -> None:
    device = FakeDevice(patience=60)
    device.stream(Stream.COMPUTE)
    assert is_held_up(device, lambda: CALLS[name](device))


def test_replays_hold_the_host_up() -> None:
    device = FakeDevice(patience=60)
    graph = device.capture(_idle, device.stream(Stream.COMPUTE))
    assert is_held_up(device, graph.replay)


def test_a_loose_device_goes_on() -> None:
    device = FakeDevice(strict=False, patience=60)
    device.stream(Stream.COMPUTE)
    gate = begin(device)
    with device.session():
        torch.ones(2, device="fake")
        device.host_buffer(torch.ones(2))
    gate.set()
