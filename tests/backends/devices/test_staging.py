"""Messages of hosts that carry a device's tensors: the host is not held up, and nothing is lost."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cg.backends.device import Device
from cg.backends.devices.staging import Copies, StagedPort
from cg.backends.poison import Poison
from cg.ir.attributes import Stream
from cg.ir.types import DType, TensorType
from tests.backends.devices.patience import PATIENCE, loose_device

from .ranks import pause

TYPE = TensorType(DType.F32, (4,))
ONES = torch.ones(4)


class Inner:
    """A port of the host, and what it was asked for."""

    def __init__(self, calls: list[Any], brings: torch.Tensor | None = None) -> None:
        self.calls = calls
        self.brings = brings

    def start(self, value: Any) -> None:
        self.calls.append(value.tolist())

    def fail(self, poison: Poison) -> None:
        self.calls.append(poison)

    def poll(self) -> bool:
        return True

    def take(self) -> Any:
        return self.brings

    def release(self) -> None:
        self.calls.append("release")


class Rig:
    """The copies of a program on a fake device, whose streams wait where a test wants it."""

    def __init__(self) -> None:
        self.fake = loose_device()
        device: Device = self.fake
        self.copies = Copies(device)
        self.calls: list[Any] = []

    def stop(self, kind: Stream) -> threading.Event:
        """Let a stream stand still until the event is set."""
        gate = threading.Event()
        self.fake.stream(kind).put("gate", lambda: bool(gate.wait(PATIENCE)) or None)
        return gate

    def sender(self, *producers: Stream, changes: bool = False) -> StagedPort:
        queues = [self.fake.stream(each) for each in producers]
        return StagedPort(
            Inner(self.calls), self.copies, TYPE, None, producers=queues, changes=changes
        )

    def receiver(self, brings: torch.Tensor, slot: int | None) -> StagedPort:
        landing = self.copies.landing(0, slot, TYPE)
        return StagedPort(Inner(self.calls, brings), self.copies, None, landing)

    def log(self, kind: Stream) -> list[str]:
        return [entry.split()[0] for entry in self.fake.stream(kind).log]


def until(done: Callable[[], bool]) -> None:
    for polls in range(int(PATIENCE / 0.0005)):
        if done():
            return
        pause(polls)
    raise AssertionError("it never happens")


def poison() -> Poison:
    failure: Any = None
    return Poison(failure)


def test_a_message_begins_when_its_copy_has_passed() -> None:
    rig = Rig()
    gate, port = rig.stop(Stream.COPY), rig.sender()
    port.start(ONES)  # returns
    assert not port.poll()
    assert not rig.calls
    gate.set()
    until(port.poll)
    assert rig.calls == [[1.0] * 4]
    port.start(ONES * 2)
    until(port.poll)
    assert rig.calls[1:] == [[2.0] * 4]


def test_what_waits_elsewhere_lets_messages_begin() -> None:
    rig = Rig()
    gate = rig.stop(Stream.COPY)
    rig.sender().start(ONES)
    assert not rig.copies.move_on()
    gate.set()
    until(rig.copies.move_on)
    assert rig.calls == [[1.0] * 4]


def test_messages_keep_their_order() -> None:
    """Errors in their place, too, and those that were copied on the other stream."""
    rig = Rig()
    gate, error = rig.stop(Stream.COPY), poison()
    ports = [rig.sender(), rig.sender(), rig.sender(changes=True)]
    ports[0].start(ONES)
    ports[1].fail(error)
    ports[2].start(ONES * 3)
    assert not any(port.poll() for port in reversed(ports))
    assert not rig.calls
    gate.set()
    until(ports[2].poll)
    assert rig.calls == [[1.0] * 4, error, [3.0] * 4]


@pytest.mark.parametrize("producer", [Stream.SEND, Stream.RECV])
def test_a_copy_waits_for_whatever_makes_its_tensor(producer: Stream) -> None:
    rig = Rig()
    value = torch.zeros(4)
    gate = rig.stop(producer)
    rig.fake.stream(producer).put("write", lambda: value.fill_(5.0) and None)
    port = rig.sender(Stream.COMPUTE, producer)
    port.start(value)
    assert not port.poll()
    gate.set()
    until(port.poll)
    assert rig.calls == [[5.0] * 4]


def test_what_may_change_is_read_in_the_order_of_the_compute_stream() -> None:
    rig = Rig()
    gate, port, value = rig.stop(Stream.COPY), rig.sender(changes=True), torch.ones(4)
    port.start(value)
    value.fill_(9.0)  # by a method that fills its memory again
    assert port.poll()
    assert rig.calls == [[1.0] * 4]
    gate.set()


def test_a_tensor_is_held_until_it_has_been_read() -> None:
    rig = Rig()
    gate, port = rig.stop(Stream.COPY), rig.sender()
    value = torch.ones(4)
    lives = weakref.ref(value)
    port.start(value)
    del value
    assert lives() is not None
    gate.set()
    until(port.poll)
    assert lives() is None


def test_the_compute_stream_waits_for_what_comes_and_the_host_does_not() -> None:
    rig = Rig()
    gate, port = rig.stop(Stream.COPY), rig.receiver(ONES, None)
    assert port.poll()
    opened = threading.Timer(0.05, gate.set)  # else the fake compute stream, which is this thread,
    opened.start()  # would wait in vain for the copy
    assert torch.equal(port.take().cpu(), ONES)
    waits = rig.fake.stream(Stream.COMPUTE).log
    assert waits[-1].replace("wait", "record") == rig.fake.stream(Stream.COPY).log[-1]


def test_pinned_memory_is_used_again_when_its_copy_has_passed() -> None:
    rig = Rig()
    port = rig.receiver(ONES, None)
    first = port.take()
    gate = rig.stop(Stream.COPY)
    port.landed.record(rig.fake.stream(Stream.COPY))  # as if that were behind the copy
    assert not port.poll()
    gate.set()
    until(port.poll)
    assert torch.equal(first.cpu(), ONES)


def test_a_slot_is_written_behind_its_release() -> None:
    rig = Rig()
    port, another = rig.receiver(ONES, 0), rig.receiver(ONES * 2, 0)
    first = port.take()
    port.release()
    released = rig.fake.stream(Stream.COMPUTE).log[-1]
    second = another.take()
    copies = rig.fake.stream(Stream.COPY).log
    assert released.replace("record", "wait") in copies[copies.index("copy") + 1 :]
    assert first.data_ptr() == second.data_ptr()
    assert rig.log(Stream.COPY) == ["wait", "copy", "record"] * 2
    assert rig.calls == ["release"]


def test_what_has_no_slot_has_memory_of_its_own() -> None:
    rig = Rig()
    first, second = (rig.receiver(ONES * i, None).take() for i in (1, 2))
    assert first.tolist() == [1.0] * 4
    assert second.tolist() == [2.0] * 4


def test_messages_that_were_not_started_are_forgotten() -> None:
    rig = Rig()
    gate, port = rig.stop(Stream.COPY), rig.sender()
    port.start(ONES)
    rig.copies.forget()
    gate.set()
    rig.fake.stream(Stream.COPY).synchronize()
    assert rig.copies.move_on()
    assert not rig.calls
