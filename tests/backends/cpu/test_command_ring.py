"""The ring of commands: rounds, readers that lag behind, a driver that waits; ranks are threads."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Iterator

import pytest

from cg.backends.cpu.control.command_ring import SLOTS, CommandRing
from cg.backends.cpu.waiting.node import MachineNode
from cg.backends.driven.commands import BITS

from .world import ThreadWorld, run_ranks

TELL_EVERY = SLOTS // 4
NUMBERS = 1 << (64 - BITS)


def never(polls: int) -> None:
    raise AssertionError("the driver waits for a reader")


@contextlib.contextmanager
def rings(
    size: int, driver: int = 0, pause: Callable[[int], None] = never
) -> Iterator[tuple[list[CommandRing], list[MachineNode]]]:
    """Every rank's end of the rings, and its node; all are the caller's from then on."""

    def make(world: ThreadWorld) -> tuple[CommandRing, MachineNode]:
        node = MachineNode(world)
        return CommandRing(node, driver, pause), node

    made = run_ranks(size, make)
    try:
        yield [ring for ring, _ in made], [node for _, node in made]
    finally:
        for _, node in made:
            node.close()


def is_rung(node: MachineNode) -> bool:
    return bool(select.select([node.bell.fileno()], [], [], 0)[0])


@pytest.mark.parametrize("burst", [1, 3, TELL_EVERY, SLOTS - TELL_EVERY, SLOTS])
@pytest.mark.parametrize("driver", [0, 1, 2])
def test_commands_come_in_order_over_several_rounds(driver: int, burst: int) -> None:
    with rings(3, driver) as (ends, _):
        others = [rank for rank in range(3) if rank != driver]
        put = ends[driver].publisher(others, ())
        readers = [ends[rank].reader(rank) for rank in others]
        first = (1 << BITS) - 1 - 4 * SLOTS  # of commands that need all their bits
        for begin in range(first, first + 3 * SLOTS + 1, burst):
            commands = list(range(begin, begin + burst))
            for command in commands:
                put(command)
            for take in readers:
                assert [take() for _ in commands] == commands
                assert take() == 0


def test_the_numbers_of_commands_start_again() -> None:
    with rings(2) as (ends, _):
        near = ends[0]._near[1]
        near._count = near._floor = ends[1]._words[SLOTS] = NUMBERS - 2 * SLOTS
        put, take = ends[0].publisher((1,), ()), ends[1].reader(1)
        for command in range(1, 4 * SLOTS):
            put(command)
            assert take() == command
            assert take() == 0


def test_a_command_goes_to_the_ranks_that_it_concerns() -> None:
    with rings(4) as (ends, _):
        to_some, to_all = ends[0].publisher((1, 3), ()), ends[0].publisher((1, 2, 3), ())
        readers = [ends[rank].reader(rank) for rank in (1, 2, 3)]
        to_some(5)
        to_all(6)
        to_some(7)
        assert [[take() for _ in range(4)] for take in readers] == [
            [5, 6, 7, 0],
            [6, 0, 0, 0],
            [5, 6, 7, 0],
        ]


def test_a_rank_that_lags_behind_holds_up_its_own_ring_alone() -> None:
    with rings(3) as (ends, _):
        to_both, to_other = ends[0].publisher((1, 2), ()), ends[0].publisher((2,), ())
        lagging, other = ends[1].reader(1), ends[2].reader(2)
        for command in range(1, SLOTS + 1):
            to_both(command)
            assert other() == command
        for command in range(1, 3 * SLOTS):
            to_other(command)
            assert other() == command
        with pytest.raises(AssertionError, match="the driver waits"):
            to_both(1)
        assert [lagging() for _ in range(SLOTS)] == list(range(1, SLOTS + 1))


def test_the_driver_waits_for_a_reader_that_is_a_whole_round_behind() -> None:
    taken: list[int] = []
    polls: list[int] = []
    told: list[bool] = []

    def pause(count: int) -> None:
        """Let the reader go on: it says where it is with the last command of a quarter."""
        polls.append(count)
        told.append(is_rung(nodes[1]))
        taken.extend(take() for _ in range(TELL_EVERY - 1 if count == 1 else 1))

    with rings(2, pause=pause) as (ends, nodes):
        put, take = ends[0].publisher((1,), ()), ends[1].reader(1)
        nodes[0].words[nodes[0].waiting(1)] = 1  # it sleeps, and no publisher is to wake it
        for command in range(1, SLOTS + 1):
            put(command)
        assert not polls
        put(SLOTS + 1)
        assert polls == [1, 2]
        assert all(told)
        for command in range(SLOTS + 2, SLOTS + TELL_EVERY + 1):
            put(command)
        assert polls == [1, 2]
        put(SLOTS + TELL_EVERY + 1)
        assert polls == [1, 2, 1, 2]
        taken.extend(iter(take, 0))
        assert taken == list(range(1, SLOTS + TELL_EVERY + 2))


def test_readers_that_sleep_are_woken_if_the_publisher_is_to() -> None:
    with rings(4) as (ends, nodes):
        put = ends[0].publisher((1, 2, 3), (1, 2))
        words = nodes[0].words
        words[nodes[0].waiting(1)] = words[nodes[0].waiting(3)] = 1
        put(1)
        assert [is_rung(node) for node in nodes] == [False, True, False, False]


def test_a_driver_and_readers_at_the_same_time() -> None:
    count = 8 * SLOTS

    def run(world: ThreadWorld) -> list[int]:
        node = MachineNode(world)
        try:
            ring = CommandRing(node, 0, lambda polls: time.sleep(0))
            taken: list[int] = []
            if world.rank == 0:
                put = ring.publisher((1, 2), ())
                for command in range(1, count + 1):
                    put(command)
            else:
                take = ring.reader(world.rank)
                while len(taken) < count:
                    if command := take():
                        taken.append(command)
                    else:
                        time.sleep(0)
            world.barrier()
            return taken
        finally:
            node.close()

    expected = list(range(1, count + 1))
    assert run_ranks(3, run) == [[], expected, expected]
