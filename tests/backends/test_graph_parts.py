"""The parts that executions are made of: records, locks, and what is known of a graph."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cg.backends.driven.commands import (
    BITS,
    CONTEXTS,
    GRAPHS,
    VARIANTS,
    Command,
    CommandKind,
    VirtualCommands,
)
from cg.backends.driven.shared_channels import share_channels
from cg.backends.errors import Failure
from cg.backends.failures.participants import participants, woken_by_command
from cg.backends.failures.unobserved_failures import unobserved_ranks
from cg.backends.poison import Poison
from cg.backends.program.ticket_locks import TicketLocks, Tickets
from cg.backends.timing.statistics import Statistics
from cg.backends.timing.tallies import count
from cg.ir.ops import Recv, Send
from cg.ir.ops.module import Module
from cg.ir.text.parser import parse_module
from cg.ir.verify.verifier import verify

FORKED = """
module @forked phase=scheduled world=4 {
  function @a.f(object) -> (object) {actor = a, effect = write, kind = opaque}
  function @b.g(object) -> (object) {actor = b, effect = write, kind = opaque}
  channel 3 {ranks = {0..1}}
  channel 5 {ranks = {1,0}}
  channel 7 {ranks = {1..2}}
  program @0(%x: object) {
    %s = send(%x) {chan = 3, peer = 1, seq = 0} : future<unit>
    %r = recv() {chan = 5, peer = 1, seq = 0} : future<object>
    %v = wait(%r) : object
    wait(%s)
    return(%v)
  }
  program @1() {
    %r = recv() {chan = 3, peer = 0, seq = 0} : future<object>
    %v = wait(%r) : object
    %h = call(%v) {fn = @a.f} : object
    %s = send(%h) {chan = 5, peer = 0, seq = 0} : future<unit>
    %t = send(%h) {chan = 7, peer = 2, seq = 0} : future<unit>
    wait(%s)
    wait(%t)
    return()
  }
  program @2() {
    %r = recv() {chan = 7, peer = 1, seq = 0} : future<object>
    %v = wait(%r) : object
    %h = call(%v) {fn = @b.g} : object
    return()
  }
  program @3() {
    return()
  }
}
"""


def forked() -> Module:
    module = parse_module(FORKED)
    verify(module)
    return module


@given(
    st.sampled_from(CommandKind),
    st.integers(0, GRAPHS - 1),
    st.integers(0, VARIANTS - 1),
    st.integers(0, CONTEXTS - 1),
)
def test_commands_are_numbers(kind: CommandKind, graph: int, variant: int, context: int) -> None:
    command = Command(kind, graph, variant, context)
    assert 0 < command.pack() < 1 << BITS
    assert Command.unpack(command.pack()) == command


def test_every_reader_gets_what_concerns_it_in_order() -> None:
    commands = VirtualCommands()
    to_both, to_one = commands.publisher((1, 2), ()), commands.publisher((2,), ())
    to_both(1)  # before anybody reads
    one, two = commands.reader(1), commands.reader(2)
    for number in range(2, 2002, 2):
        to_one(number)
        to_both(number + 1)
    assert [one() for _ in range(1002)] == [*range(1, 2002, 2), 0]
    assert [two() for _ in range(2002)] == [*range(1, 2002), 0]


def test_executions_pass_an_actor_in_the_order_of_their_tickets() -> None:
    locks = TicketLocks()
    programs = [Tickets(locks) for _ in range(3)]
    gates = [tickets.acquire_and_release("a") for tickets in programs]
    for tickets in programs:
        assert not tickets.is_empty
        tickets.take()
    assert [wait() for wait, _ in gates] == [True, False, False]
    gates[0][1]()
    programs[0].take()  # it comes last now
    assert [wait() for wait, _ in gates] == [False, True, False]
    for _, go_on in (gates[1], gates[2]):
        go_on()
    assert [wait() for wait, _ in gates] == [True, False, False]


def test_who_takes_part_who_is_woken_and_who_has_to_report() -> None:
    module = forked()
    assert participants([module], 0) == {1, 2}
    assert woken_by_command([module], 0) == (2,)  # rank 1 is woken by the input
    assert unobserved_ranks(module, 0) == (2,)  # nothing of its call goes anywhere
    assert unobserved_ranks(module, 2) == ()  # rank 1 sends its result to rank 2


def test_modules_share_channels() -> None:
    one, other = forked(), forked()
    other.channels = {id_: c for id_, c in other.channels.items() if id_ != 7}
    other.programs = other.programs[:1]
    channels = share_channels([one, other])
    assert [(c.id, c.ranks) for c in channels] == [(0, (0, 1)), (1, (1, 0)), (2, (1, 2))]
    assert list(one.channels) == [0, 1, 2]
    assert list(other.channels) == [0, 1]
    for module in (one, other):
        used = {op.chan for p in module.programs for op in p.ops if isinstance(op, (Send, Recv))}
        assert used == set(module.channels)


def test_statistics_add_up() -> None:
    one, other = Statistics(), Statistics()
    count(one, 2.0, 1.0)
    count(other, 4.0, 1.0)
    other.failures += 1
    both = one + other
    assert (both.executions, both.total, both.blocked, both.failures) == (2, 6.0, 2.0, 1)
    assert both.last_total == 4.0
    assert (one + Statistics()).last_total == 2.0
    assert (both.median_total, both.median_blocked) == (3.0, 1.0)
    assert (Statistics().median_total, Statistics().last_blocked) == (0.0, 0.0)


def test_statistics_are_values() -> None:
    one, other = Statistics(), Statistics()
    assert one == other
    count(one, 2.0, 1.0)
    assert one != other
    count(other, 2.0, 1.0)
    assert one == other
    other.recent.append((0.5, 0.5))
    assert one != other
    assert one != "Statistics(executions=1, failures=0, total=2, blocked=1)"
    assert repr(one) == "Statistics(executions=1, failures=0, total=2, blocked=1)"
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


def test_medians_are_of_the_latest_executions() -> None:
    statistics = Statistics()
    for number in range(1000):
        count(statistics, float(number), 0.0)
    assert statistics.executions == 1000
    assert len(statistics.recent) == 256
    assert statistics.median_total == 999 - 255 / 2


def test_poison_is_raised_as_it_is() -> None:
    poison = Poison(Failure("ValueError", "x", 1, "op"), ValueError("x"))
    with pytest.raises(Poison) as caught:
        raise poison
    assert Poison.from_bytes(caught.value.to_bytes()).failure == poison.failure
