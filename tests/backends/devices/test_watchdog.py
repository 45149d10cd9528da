"""Who is stuck is found out by another thread; who works is left alone."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import pytest

from cg.backends.devices import watchdog
from cg.backends.devices.watchdog import Watchdog, put_by
from cg.backends.flight import Position
from cg.ir.module import Module, Program
from cg.ir.parser import parse_module

from .fakes import FakeDevice

PROGRAM = """
module @step phase=scheduled world=1 {
  function @a.graph(f32[2]) -> (f32[2]) {effect = pure, kind = graph}
  function @a.opaque(f32[2]) -> (f32[2]) {effect = write, kind = opaque}
  program @0(%x: f32[2]) {
    %y = call(%x) {fn = @a.graph, stream = compute} : f32[2]
    %z = call(%y) {fn = @a.opaque, stream = compute} : f32[2]
    return(%z)
  }
}
"""
GRAPH, OPAQUE = 0, 1
AT = Position(rank=0, execution=3, op=GRAPH)


@dataclass
class Bound:
    program: Program
    module: Module
    at: Position

    def position(self) -> Position:
        return self.at


@pytest.fixture
def bound() -> Bound:
    module = parse_module(PROGRAM)
    return Bound(module.programs[0], module, AT)


def test_where_the_host_may_take_long(bound: Bound) -> None:
    assert put_by(bound) == AT
    for elsewhere in (
        replace(AT, op=OPAQUE),
        replace(AT, awaited=0),
        replace(AT, running=False),
    ):
        bound.at = elsewhere
        assert put_by(bound) is None


class BrokenEvent:
    """The event of a device that has come upon an error of its own."""

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        raise RuntimeError("device-side assert triggered")

    def synchronize(self) -> None:
        pass


def test_a_device_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "INTERVAL", 0.01)
    device = FakeDevice()
    monkeypatch.setattr(device, "event", BrokenEvent)
    barked: list[str] = []
    done = threading.Event()

    def bark(trouble: str) -> None:
        barked.append(trouble)
        done.set()

    dog = Watchdog(device, None, list, bark)
    dog.watch(7)
    assert done.wait(20)
    dog.close()
    assert "the device has failed in execution 7 or behind it" in barked[0]
    assert "device-side assert triggered" in barked[0]


@pytest.mark.parametrize("moves", [False, True])
def test_a_host_that_does_not_go_on(
    bound: Bound, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "INTERVAL", 0.01)
    monkeypatch.setattr(watchdog, "GRACE", 0.05)
    barked: list[str] = []
    looked, done = 0, threading.Event()

    def putting() -> Position | None:
        nonlocal looked
        looked += 1
        if looked == 60:
            done.set()
        return replace(AT, execution=looked if moves else 3)

    def bark(trouble: str) -> None:
        barked.append(trouble)
        done.set()

    dog = Watchdog(FakeDevice(), 0.1, list, bark, putting)
    assert done.wait(20)
    dog.close()
    if moves:
        assert barked == []
    else:
        assert "has not taken the next piece of execution 3 for 0.1 s" in barked[0]
