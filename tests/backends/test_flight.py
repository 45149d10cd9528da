"""The positions of ranks, and who waits for whom by them."""

from __future__ import annotations

import pytest

from cg.backends.failures.flight import FlightRecord, Position, Sight, where_ranks_are

from .programs import CHAIN, exchange, module
from .test_collectives import MEET, barrier

SWAP = module(exchange("send sent recv got", "recv got send sent"))


def reasons(*positions: Position) -> dict[int, tuple[int, ...]]:
    return {entry.rank: entry.on for entry in FlightRecord(SWAP, positions).blocked()}


def test_a_rank_that_runs_or_has_ended_is_not_blocked() -> None:
    record = FlightRecord(
        module(CHAIN),
        [
            Position(0, 4, 0, running=False, is_ending=True),
            Position(1, 4, 2),
            Position(2, 4, 1, awaited=0),
        ],
    )
    assert [entry.rank for entry in record.blocked()] == [2]
    assert record.describe() == (
        "  rank 0 has done its part of execution 4, and waits at its end for the others\n"
        "  rank 1 runs b.double, called at chain.py:4, in step "
        "(`%h = call(%v) {fn = @b.double} : f32[4]`)\n"
        "  rank 2 waits at `%v = wait(%r) : f32[4]` for `%r = recv() {chan = 1, peer = 1, "
        "seq = 0} : future<f32[4]>`: rank 1 has not come to its send of message 0 of channel 1"
    )


def test_how_long_a_rank_has_been_where_it_is() -> None:
    text = FlightRecord(module(CHAIN), [Position(1, 4, 2, seconds=2.04)]).describe()
    assert text.startswith("  rank 1 runs b.double for 2.0 s at most, called at chain.py:4")
    text = FlightRecord(module(CHAIN), [Position(1, 4, 0, seconds=0.5)]).describe()
    assert text.startswith("  rank 1 runs for 0.5 s at most: `%r = recv()")


def test_a_rank_that_was_asked_knows_better_than_its_position() -> None:
    plan = module(CHAIN)
    waits = Position(1, 4, 1, awaited=0)
    said = Sight("rank 1 runs something\n    its Python is at line 7")
    assert where_ranks_are([FlightRecord(plan, [waits])], {1: said}) == f"  {said.text}"
    assert where_ranks_are([FlightRecord(plan, [])], {1: said}) == f"  {said.text}"


def test_ranks_are_described_in_their_order_by_what_is_known_best() -> None:
    ended = Position(0, 3, 1, running=False)
    first = FlightRecord(SWAP, [ended, Position(1, 3, 0)], label="@swap 3: ")
    second = FlightRecord(module(CHAIN), [Position(1, 4, 2)], label="@chain 4: ")
    words = {3: "rank 3 is elsewhere", 0: "rank 0 is unknown", 2: "rank 2 is unknown"}
    lines = where_ranks_are([first, second], {2: Sight("rank 2 sleeps")}, words).splitlines()
    begins = [
        "@swap 3: rank 0 has",
        "@swap 3: rank 1 ",
        "@chain 4: rank 1 runs b.double",
        "rank 2 sleeps",
    ]
    for line, begin in zip(lines, [*begins, "rank 3 is elsewhere"], strict=True):
        assert line.startswith(f"  {begin}")


def test_the_calls_of_a_rank_that_gives_no_answer_are_found_by_its_stack() -> None:
    plan = module(CHAIN)
    said = Sight("rank 1 is silent\n    its Python is at line 7", "double")
    records = [FlightRecord(plan, []), FlightRecord(plan, [])]
    assert where_ranks_are(records, {1: said}) == (
        "  rank 1 is silent; it runs b.double, called at chain.py:4, in step "
        "(`%h = call(%v) {fn = @b.double} : f32[4]`)\n    its Python is at line 7"
    )
    assert where_ranks_are(records, {2: said}) == f"  {said.text}"
    assert where_ranks_are(records, {1: Sight(said.text, "another")}) == f"  {said.text}"


@pytest.mark.parametrize(
    ("other", "on"),
    [
        (Position(1, 7, 0), (1,)),  # at its recv, not past it
        (Position(1, 7, 1, awaited=0), (1,)),  # issued it: only its buffer can be missing
        (Position(1, 7, 0, running=False), (1,)),
    ],
)
def test_a_sender_waits_for_its_receiver(other: Position, on: tuple[int, ...]) -> None:
    assert reasons(Position(0, 7, 1, awaited=0), other)[0] == on


def test_whether_both_sides_are_posted_is_seen_from_position_execution_and_end() -> None:
    def reason(other: Position) -> str:
        record = FlightRecord(SWAP, [Position(0, 7, 1, awaited=0), other])
        return record.blocked()[0].reason

    posted, missing = "is posted on both sides", "rank 1 has not come to its recv"
    assert missing in reason(Position(1, 7, 0))
    assert posted in reason(Position(1, 7, 1))
    assert posted in reason(Position(1, 7, 0, running=False))
    assert posted in reason(Position(1, 8, 0))
    assert missing in reason(Position(1, 6, 3))
    assert missing in reason(Position(1, 6, 0, running=False))


def test_a_rank_nobody_has_heard_of_is_waited_for_and_nothing_is_said_of_it() -> None:
    (blocked,) = FlightRecord(SWAP, [Position(0, 0, 1, awaited=0)]).blocked()
    assert blocked.on == (1,)
    assert blocked.reason == (
        "rank 0 waits at swap.py:2, in step (`wait(%s)`) for swap.py:1, in step "
        "(`%s = send(%x) {chan = 0, peer = 1, seq = 0} : future<unit>`): "
        "it needs rank 1's recv of message 0 of channel 0"
    )


def test_who_waits_for_a_report_names_the_last_call_of_its_rank() -> None:
    (blocked,) = FlightRecord(module(CHAIN), [Position(0, 0, 0, reporter=1)]).blocked()
    assert blocked.on == (1,)
    assert blocked.reason == (
        "rank 0 waits for rank 1 to end its program, whose last call is chain.py:4, in step "
        "(`%h = call(%v) {fn = @b.double} : f32[4]`)"
    )


def test_a_line_is_named_once() -> None:
    text = CHAIN.replace("%v = wait(%r) : f32[4]", '%v = wait(%r) : f32[4] loc("chain.py":3)')
    text = text.replace("future<f32[4]>", 'future<f32[4]> loc("chain.py":3)')
    (blocked,) = FlightRecord(module(text), [Position(1, 0, 1, awaited=0)]).blocked()
    assert blocked.reason.count("chain.py:3") == 1


def test_on_devices_a_host_that_is_through_may_be_ahead() -> None:
    ended = [Position(0, 4, 0, running=False), Position(1, 4, 0, running=False)]
    assert FlightRecord(SWAP, ended, devices={0}).describe() == (
        "  the host of rank 0 has put all of execution 4 on its device, which may not have ended "
        "it\n  rank 1 has done its part of execution 4, and waits for nobody"
    )


def test_a_collective_waits_for_those_who_have_not_come() -> None:
    plan = module(barrier(MEET, MEET))
    record = FlightRecord(plan, [Position(0, 0, 1, awaited=0), Position(1, 0, 0)])
    (blocked,) = record.blocked()
    assert blocked.on == (1,)
    assert "rank 1 has not come to barrier 0 of channel 0" in blocked.reason
    assert record.cycle() == ()


def test_a_collective_knows_nothing_of_those_nobody_has_heard_of() -> None:
    plan = module(barrier(MEET, MEET))
    (blocked,) = FlightRecord(plan, [Position(0, 0, 1, awaited=0)]).blocked()
    assert blocked.on == (1,)
    assert blocked.reason.endswith(
        ": it is not known whether rank 1 has come to barrier 0 of channel 0"
    )
