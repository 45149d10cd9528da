"""Who is stuck is found out by another thread; who works is left alone."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from cg.backends.devices.programs import watchdog
from cg.backends.devices.programs.watchdog import Watchdog, put_by
from cg.backends.failures.flight import Position
from cg.backends.streams.library import CommunicationError
from cg.ir.ops.module import Module, Program
from cg.ir.text.parser import parse_module
from tests.backends.devices.patience import loose_device

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
AT_EXIT = """
import time
import torch
from cg.backends.devices.programs import watchdog
from cg.launch.world.world import world

class Event:
    def query(self):
        torch.mm(matrix, matrix)
        return True

matrix = torch.ones(600, 600)
watchdog.INTERVAL = 0.001
world()
watching = watchdog.Watchdog(None, None, list, print)
watching._spare.append(Event())
time.sleep(0.1)
"""
"""A program that ends while a watchdog is in the device's library nearly all the time."""
GRAPH, OPAQUE = 0, 1
WORK: Any = SimpleNamespace(
    name="step 'it'",
    unfinished="  a part of execution {}".format,
    suspects=lambda begun: ["  it.look_up"],
)
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
    device = loose_device()
    monkeypatch.setattr(device, "event", BrokenEvent)
    barked: list[str] = []
    done = threading.Event()

    def bark(trouble: str) -> None:
        barked.append(trouble)
        done.set()

    dog = Watchdog(device, None, list, bark)
    dog.watch(WORK, 7)
    assert done.wait(20)
    dog.close()
    assert "the device has failed in execution 7 of step 'it' or behind it" in barked[0]
    assert "device-side assert triggered" in barked[0]


@pytest.mark.parametrize("is_raised", [False, True])
def test_an_error_that_an_execution_has_noted(
    is_raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the job unless a later execution raises it meanwhile."""
    monkeypatch.setattr(watchdog, "INTERVAL", 60)
    now = [0.0]
    monkeypatch.setattr(watchdog, "monotonic", lambda: now[0])
    notes = ["index 7 at [0] is out of range"]
    device: Any = loose_device()
    dog = Watchdog(device, None, list, lambda _: None, noted=lambda: (*notes, None)[0])
    assert dog.look() is None
    now[0] = watchdog.GRACE - 0.1
    assert dog.look() is None
    if is_raised:
        error = notes.pop()
        assert dog.look() is None
        notes.append(error)
    now[0] = watchdog.GRACE + 0.1
    assert dog.look() == (None if is_raised else "index 7 at [0] is out of range")
    dog.close()


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

    dog = Watchdog(loose_device(), 0.1, list, bark, putting)
    assert done.wait(20)
    dog.close()
    if moves:
        assert barked == []
    else:
        assert "has not taken the next piece of execution 3 for 0.1 s" in barked[0]


class Queue:
    """A compute stream that passes events when it is told to."""

    def __init__(self) -> None:
        self.put = self.done = 0
        self.made: list[Mark] = []

    def event(self) -> Mark:
        self.made.append(Mark(self))
        return self.made[-1]


class Mark:
    """An event of it."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.at = 0
        self.asked = 0

    def record(self, stream: object) -> None:
        self.queue.put += 1
        self.at = self.queue.put

    def query(self) -> bool:
        self.asked += 1
        return self.at <= self.queue.done

    def synchronize(self) -> None:
        pass


@dataclass
class Watching:
    """A watchdog that looks when it is told to, by a clock that goes when it is told to."""

    dog: Watchdog
    queue: Queue
    now: float = 0.0

    def watch(self, *executions: int) -> None:
        for execution in executions:
            self.dog.watch(WORK, execution)

    def after(self, seconds: float, done: int) -> str | None:
        """Its message once the device has done so many executions in all; None if all is well."""
        self.now += seconds
        self.queue.done = done
        return self.dog.look()


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watching]:
    monkeypatch.setattr(watchdog, "INTERVAL", 1000.0)
    device, queue = loose_device(), Queue()
    monkeypatch.setattr(device, "event", queue.event)
    found: list[Watching] = []
    monkeypatch.setattr(watchdog, "monotonic", lambda: found[0].now if found else 0.0)
    dog = Watchdog(device, 10.0, list, lambda trouble: None)
    found.append(Watching(dog, queue))
    yield found[0]
    dog.close()


def test_a_driver_that_waits_with_nothing_ahead(watching: Watching) -> None:
    """Messages that an earlier execution waits for are not broken off."""
    released: list[float] = []
    dog = Watchdog(
        loose_device(),
        10.0,
        list,
        lambda _: None,
        lambda: AT,
        release=lambda: released.append(watching.now),
    )
    watching.watch(2)
    for seconds, done in ((0.0, 0), (watchdog.STUCK + 0.1, 0), (0.1, 1)):
        assert released == []
        assert watching.after(seconds, done) is None
        assert dog.look() is None
    assert released == [watching.now]
    dog.close()


def test_an_execution_that_does_not_end(watching: Watching) -> None:
    watching.watch(4)
    assert watching.after(9, done=0) is None
    trouble = watching.after(2, done=0)
    assert trouble is not None
    assert trouble == (
        "the host has put all of execution 4 of step 'it' on the device, which has not ended it "
        "after 10 s. The device is at:\n  a part of execution 4"
    )


def test_the_one_behind_another_that_ends_is_watched_too(watching: Watching) -> None:
    watching.watch(4, 5)
    assert watching.after(1, done=1) is None
    assert watching.after(9, done=1) is None  # the device has had it for no more than that
    trouble = watching.after(2, done=1)
    assert trouble is not None
    assert "the host has put all of execution 5 of" in trouble


def test_one_that_is_put_while_the_one_ahead_is_let_go_is_not_lost(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching.watch(4)
    first = watching.queue.made[0]

    def query() -> bool:
        if not first.asked:
            first.asked += 1
            watching.watch(5)
        return True

    monkeypatch.setattr(first, "query", query)
    assert watching.after(1, done=1) is None
    trouble = watching.after(11, done=1)
    assert trouble is not None
    assert "the host has put all of execution 5 of" in trouble


def test_a_device_that_is_far_behind_but_goes_on_is_left_alone(watching: Watching) -> None:
    watching.watch(*range(100))
    for done in range(1, 101):
        assert watching.after(9, done) is None
    assert watching.after(100, done=100) is None


def test_events_are_used_again_and_those_of_a_device_that_keeps_up_are_asked_for_once(
    watching: Watching,
) -> None:
    for done in range(50, 501, 50):
        watching.watch(*range(50))
        asked = sum(event.asked for event in watching.queue.made)
        assert watching.after(1, done) is None
        assert sum(event.asked for event in watching.queue.made) == asked + 1
    assert len(watching.queue.made) == 50


def test_nothing_is_lined_up_once_nobody_looks(watching: Watching) -> None:
    watching.dog.close()
    watching.watch(4)
    assert watching.queue.made == []


def test_a_look_that_fails_is_told_and_not_the_end_of_looking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "INTERVAL", 0.01)
    barked: list[str] = []
    done = threading.Event()

    def faults() -> list[str]:
        raise CommunicationError("invalid argument")

    def bark(trouble: str) -> None:
        barked.append(trouble)
        done.set()

    dog = Watchdog(loose_device(), None, faults, bark)
    assert done.wait(20)
    dog.close()
    assert "cannot be watched any more" in barked[0]
    assert "CommunicationError: invalid argument" in barked[0]


def test_no_watchdog_is_in_the_library_of_its_device_when_the_interpreter_ends() -> None:
    """Else the process is aborted, by chance: in four of six runs of this program."""
    for _ in range(3):
        command = [sys.executable, "-c", AT_EXIT]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=250)
        assert (ended.returncode, ended.stderr) == (0, "")
