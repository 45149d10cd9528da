"""Clocks of ranks that are apart, found out by meetings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.clocks import ClockReading, common_time, compare_clocks, readings

Meetings = list[tuple[list[int], list[int]]]


def meetings(offsets: list[int], times: list[list[tuple[int, int]]]) -> Meetings:
    """The times that clocks with these offsets show.

    Args:
        offsets: for each rank.
        times: for each meeting and each rank how long the rank took to come, and then to leave.
    """
    shown: Meetings = [([], []) for _ in offsets]
    now = 1000
    for meeting in times:
        last = now + max(come for come, _ in meeting)
        for offset, (came, left), (come, leave) in zip(offsets, shown, meeting, strict=True):
            came.append(now + come + offset)
            left.append(last + leave + offset)
        now = last + max(leave for _, leave in meeting)
    return shown


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[int], list[int], Meetings]:
    ranks = draw(st.integers(2, 5))
    nodes = [0, *(draw(st.integers(0, 2)) for _ in range(ranks - 1))]
    of_node = [0, *(draw(st.integers(-(10**9), 10**9)) for _ in range(2))]
    offsets = [of_node[node] for node in nodes]
    delays = st.tuples(st.integers(0, 10_000), st.integers(1, 10_000))
    rounds = draw(
        st.lists(st.lists(delays, min_size=ranks, max_size=ranks), min_size=1, max_size=6)
    )
    return nodes, offsets, meetings(offsets, rounds)


@given(worlds())
def test_no_offset_is_wrong_by_more_than_its_uncertainty(
    world: tuple[list[int], list[int], Meetings],
) -> None:
    nodes, offsets, met = world
    found = readings(met, nodes)
    for node, offset, reading in zip(nodes, offsets, found, strict=True):
        assert abs(reading.offset - offset) <= reading.uncertainty
        if node == 0:
            assert (reading.offset, reading.uncertainty) == (0, 0)
    assert len({(node, r.offset, r.uncertainty) for node, r in zip(nodes, found, strict=True)}) == (
        len(set(nodes))
    )


def test_a_quick_meeting_gives_a_sharp_bound() -> None:
    slow, quick = [(0, 9000), (8000, 1)], [(5, 3), (0, 3)]
    (_, reading) = readings(meetings([0, 700], [slow, quick, slow]), [0, 1])
    assert abs(reading.offset - 700) <= reading.uncertainty <= 6


def test_one_machine_whose_clocks_differ_is_believed() -> None:
    # As in containers that each have a clock of their own.
    found = readings(meetings([0, 10**6], [[(0, 5), (2, 5)]]), [0, 0])
    assert abs(found[1].offset - 10**6) <= found[1].uncertainty <= 10


def test_drift_is_taken_to_be_even() -> None:
    first, last = ClockReading(1000, 100, 1), ClockReading(3000, 300, 1)
    assert [common_time(t, first, last) for t in (1000, 2000, 3000)] == [900, 1800, 2700]
    assert common_time(1500, first, first) == 1400


def test_a_virtual_world_has_one_clock() -> None:
    found = compare_clocks(VirtualWorld(3))
    assert [(r.offset, r.uncertainty) for r in found] == [(0, 0)] * 3
    assert found[0].at == pytest.approx(found[2].at)
