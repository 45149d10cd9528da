"""Communicators outlive the plans that they were made for, until others need the room."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from cg.backends.device import Device
from cg.backends.errors import BindError
from cg.backends.fake.device import FakeDevice
from cg.backends.fake.library import FakeComm, FakeLibrary
from cg.backends.nccl.communicator import NcclCommunicator
from cg.backends.nccl.pool import NcclPool
from cg.ir.attributes import Traffic
from cg.ir.ops.module import Channel
from tests.backends.devices.patience import loose_device

from .ranks import ThreadWorld, on_ranks

THERE, BACK = Channel(0, (0, 1)), Channel(1, (1, 0))
ALL = Channel(2, (0, 1), collective=True)
REDUCED = Channel(3, (0, 1), collective=True, traffic=Traffic.REDUCE)


class Small(NcclPool):
    """One with room for two communicators a rank."""

    limit = 2


class Noting(FakeLibrary):
    """One that notes which communicators were made, and given up, by number."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device)
        self.made: list[FakeComm] = []
        self.gone: list[int] = []

    def connect(self, size: int, unique: bytes, rank: int) -> FakeComm:
        self.made.append(super().connect(size, unique, rank))
        return self.made[-1]

    def destroy(self, comm: FakeComm) -> None:
        self.gone.append(self.made.index(comm))
        super().destroy(comm)


class Rank:
    """A rank with a small pool."""

    def __init__(self, world: ThreadWorld) -> None:
        self.world = world
        self.device = world.device = loose_device(world.rank)
        self.library = Noting(self.device)
        device: Device = self.device
        self.pool = Small(world, device, self.library)

    def open(self, name: str, *channels: Channel) -> NcclCommunicator:
        """A plan of some channels."""
        made = NcclCommunicator(self.pool, channels, self.world.rank)
        made.of_step(name)
        return made

    def refused(self, *channels: Channel) -> str:
        with pytest.raises(BindError) as raised:
            self.open("new", *channels)
        return str(raised.value)


def both(play: Any, size: int = 2) -> list[Any]:
    return on_ranks(size, lambda world: play(Rank(world)))


def test_a_closed_plan_leaves_its_communicators_to_the_next() -> None:
    def play(rank: Rank) -> tuple[int, Sequence[int]]:
        for name in ("first", "second", "third"):
            rank.open(name, THERE, BACK).close()
        return len(rank.library.made), rank.library.gone

    assert both(play) == [(2, [])] * 2


def test_what_no_open_plan_uses_makes_room() -> None:
    def play(rank: Rank) -> tuple[int, Sequence[int]]:
        rank.open("first", THERE, BACK).close()
        kept = rank.open("second", BACK)
        rank.open("third", ALL)
        kept.close()
        return len(rank.library.made), rank.library.gone

    assert both(play) == [(3, [0])] * 2


def test_what_the_new_plan_uses_again_is_kept() -> None:
    def play(rank: Rank) -> tuple[int, Sequence[int]]:
        rank.open("first", THERE, BACK).close()
        rank.open("second", ALL, BACK)
        return len(rank.library.made), rank.library.gone

    assert both(play) == [(3, [0])] * 2


def test_all_ranks_give_up_in_one_order() -> None:
    """Also one that has room itself, where others need it."""
    first = [Channel(0, (1, 2)), Channel(1, (0, 1)), Channel(2, (2, 0))]

    def play(rank: Rank) -> Sequence[int]:
        rank.open("first", *first).close()
        rank.open("second", Channel(3, (1, 0)))
        return rank.library.gone

    assert both(play, 3) == [[0, 1]] * 3


def test_what_one_rank_still_uses_stays_on_all() -> None:
    def play(rank: Rank) -> tuple[str, Sequence[int]]:
        late = rank.open("late", THERE, BACK)
        if rank.world.rank == 0:
            late.close()
        said = rank.refused(ALL)
        assert not rank.library.gone
        rank.world.barrier()
        late.close()
        rank.open("new", ALL)
        return said, rank.library.gone

    (mine, gone), other = both(play)
    assert (mine, gone) == other
    assert gone == [0, 1]
    assert mine == (
        "rank 0 would be a member of 3 NCCL communicators, and 2 is the most: this step needs 1, "
        "and open ones hold 2 more ('late': 2). Each direction between two ranks takes one, and so "
        "does each group of a collective. Close steps that are not needed any more; let values "
        "that are rarely sent take another way, by cg.via(x, 'cpu'); have collectives over fewer "
        "groups"
    )


def test_a_step_that_needs_too_many_by_itself_closes_nothing() -> None:
    def play(rank: Rank) -> tuple[str, Sequence[int]]:
        rank.open("before", THERE).close()
        return rank.refused(THERE, REDUCED, BACK), rank.library.gone

    for said, gone in both(play):
        assert not gone
        assert re.search("this step needs 3. Each direction .* Let values that are rarely", said)


def test_a_plan_that_could_not_be_made_holds_nothing() -> None:
    class Failing(NcclCommunicator):
        def _make_slots(self, channels: Sequence[Channel], rank: int) -> Any:
            raise MemoryError

    def play(rank: Rank) -> Sequence[int]:
        with pytest.raises(MemoryError):
            Failing(rank.pool, [THERE, BACK], rank.world.rank)
        rank.open("next", ALL)
        return rank.library.gone

    assert both(play) == [[0, 1]] * 2


def test_faults_are_asked_for_while_communicators_are_given_up() -> None:
    """By the watchdogs of other plans: what has been given up is asked for no more."""

    class Asking(Noting):
        def destroy(self, comm: FakeComm) -> None:
            super().destroy(comm)
            assert not any(line.comm is comm for line in lines[self])

        def error(self, comm: FakeComm) -> str | None:
            assert self.made.index(comm) not in self.gone
            return None

    lines: dict[Asking, Any] = {}

    def play(world: ThreadWorld) -> list[str]:
        device = loose_device(world.rank)
        library = Asking(device)
        pool = Small(world, device, library)
        lease = pool.join([THERE, BACK])
        lines[library] = list(lease.lines.values())
        pool.leave(lease)
        pool.join([ALL])
        return pool.errors()

    assert on_ranks(2, play) == [[], []]
