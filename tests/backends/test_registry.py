"""Communicators by name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any

import pytest

from cg.backends.base import Communicator, World
from cg.backends.errors import UnknownCommunicator
from cg.backends.transports import registry
from cg.backends.transports.registry import Registry
from cg.backends.virtual.fabric import VirtualFabric
from cg.backends.virtual.world import VirtualWorld
from cg.ir.ops.module import Channel

CHANNELS = [Channel(0, (0, 1))]


def make(world: World, channels: Sequence[Channel]) -> Communicator:
    return VirtualFabric().communicator(world.size - len(channels))


def broken(world: World, channels: Sequence[Channel]) -> Communicator:
    raise OSError("no such device")


def test_create_calls_the_factory() -> None:
    made: list[tuple[World, Sequence[Channel], Communicator]] = []

    def noted(world: World, channels: Sequence[Channel]) -> Communicator:
        made.append((world, channels, make(world, channels)))
        return made[-1][-1]

    known = Registry("cg.test.none")
    known.register("mine", noted)
    known.register("mine", noted)
    assert known.names() == ("mine",)
    world = VirtualWorld(2)
    communicator = known.create("mine", world, CHANNELS)
    assert made == [(world, CHANNELS, communicator)]


def test_a_factorys_error_is_the_users_to_see() -> None:
    known = Registry("cg.test.none")
    known.register("mine", broken)
    with pytest.raises(OSError, match="no such device"):
        known.create("mine", VirtualWorld(2), CHANNELS)


def test_a_taken_name_is_an_error() -> None:
    known = Registry("cg.test.none")
    known.register("mine", make)
    with pytest.raises(ValueError, match="'mine' is registered already"):
        known.register("mine", broken)


def test_an_unknown_name_lists_the_known() -> None:
    known = Registry("cg.test.none")
    with pytest.raises(UnknownCommunicator, match=r"'x'; known are: auto, cpu, mpi\."):
        known.create("x", VirtualWorld(1), [])
    known.register("b", make)
    known.register("a", make)
    with pytest.raises(UnknownCommunicator, match=r"a, auto, b, cpu, mpi\. .* 'cg\.test\.none'"):
        known.create("x", VirtualWorld(1), [])


def test_entry_points_are_found_and_loaded_when_asked_for(monkeypatch: Any) -> None:
    entry = metadata.EntryPoint("theirs", f"{__name__}:make", "cg.communicators")
    loaded: list[str] = []

    class Entry:
        name = entry.name

        def load(self) -> Any:
            loaded.append(self.name)
            return make

    def entry_points(*, group: str, name: str | None = None) -> list[Entry]:
        assert group == "cg.communicators"
        return [Entry()] if name in (None, entry.name) else []

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    known = Registry()
    assert known.names() == ("theirs",)
    assert not loaded
    known.create("theirs", VirtualWorld(1), [])
    known.create("theirs", VirtualWorld(1), [])
    assert loaded == ["theirs"]


def test_the_processs_registry_looks_for_entry_points_of_the_documented_group() -> None:
    with pytest.raises(UnknownCommunicator, match=r"'cg\.communicators'"):
        registry.create("no-such-transport", VirtualWorld(1), [])
