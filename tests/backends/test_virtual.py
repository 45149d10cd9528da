"""The virtual world: exchange, deadlocks, order of turns, ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cg.backends.base import Communicator, World
from cg.backends.errors import DeadlockError, InputError, RemoteError
from cg.backends.virtual.fabric import VirtualFabric
from cg.backends.virtual.world import VirtualExecutable, VirtualWorld

from ..sampling import scaled
from .programs import CHAIN, CHAIN_BODIES, exchange, module, run

ZEROS, ONES = torch.zeros(2), torch.ones(2)


def test_chain_of_three() -> None:
    outputs = run(CHAIN, [[torch.arange(4.0)], [], []], CHAIN_BODIES)
    assert outputs[:2] == [(), ()]
    assert torch.equal(outputs[2][0], torch.tensor([1.0, 3.0, 5.0, 7.0]))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("recv send got sent", "recv send got sent"),
        ("send recv sent got", "send recv sent got"),
        ("send sent recv got", "recv got send sent"),
        ("recv send sent got", "send sent recv got"),
    ],
)
@pytest.mark.parametrize("shuffle", [None, 0, 1])
def test_exchange(first: str, second: str, shuffle: int | None) -> None:
    outputs = run(exchange(first, second), [[ZEROS], [ONES]], shuffle=shuffle)
    assert torch.equal(outputs[0][0], ONES)
    assert torch.equal(outputs[1][0], ZEROS)


@pytest.mark.parametrize("shuffle", [None, 0, 1, 2])
def test_crossing_rendezvous_sends_are_a_deadlock_with_its_cycle(shuffle: int | None) -> None:
    text = exchange("send sent recv got", "send sent recv got")
    with pytest.raises(DeadlockError) as caught:
        run(text, [[ZEROS], [ONES]], shuffle=shuffle)
    assert str(caught.value) == (
        "deadlock: no rank of @swap can go on\n"
        "  rank 0 waits at swap.py:2, in step (`wait(%s)`) for "
        "swap.py:1, in step (`%s = send(%x) {chan = 0, peer = 1, seq = 0} : future<unit>`): "
        "rank 1 has not come to its recv of message 0 of channel 0\n"
        "  rank 1 waits at swap.py:12, in step (`wait(%s)`) for "
        "swap.py:11, in step (`%s = send(%x) {chan = 1, peer = 0, seq = 0} : future<unit>`): "
        "rank 0 has not come to its recv of message 0 of channel 1\n"
        "  cycle: rank 0 -> rank 1 -> rank 0"
    )


def test_deadlock_of_receives() -> None:
    text = exchange("recv got send sent", "recv got send sent")
    with pytest.raises(DeadlockError, match="rank 1 has not come to its send of message 0"):
        run(text, [[ZEROS], [ONES]])


def test_a_message_that_is_never_sent_is_a_deadlock_without_a_cycle() -> None:
    text = """
    module @lost phase=scheduled world=2 {
      channel 0 {ranks = {0..1}}
      program @0() { return() }
      program @1() {
        %r = recv() {chan = 0, peer = 0, seq = 0} : future<f32[2]>
        %v = wait(%r) : f32[2]
        return(%v)
      }
    }
    """
    with pytest.raises(DeadlockError) as caught:
        VirtualExecutable(module(text, check=False), {}, {}).run([[], []])
    assert "rank 0 has done its part of execution 0, and waits for nobody" in str(caught.value)
    assert "rank 0 never has message 0 of channel 0" in str(caught.value)
    assert "cycle" not in str(caught.value)


def test_a_deadlock_leaves_the_executable_usable() -> None:
    text = """
    module @maybe phase=scheduled world=2 {
      function @a.f(f32[2]) -> (f32[2]) {actor = a, effect = write, kind = opaque}
      channel 0 {ranks = {0..1}}
      program @0(%x: f32[2]) {
        %y = call(%x) {fn = @a.f} : f32[2]
        %s = send(%y) {chan = 0, peer = 1, seq = 0} : future<unit>
        wait(%s)
        return()
      }
      program @1() {
        %r = recv() {chan = 0, peer = 0, seq = 0} : future<f32[2]>
        %v = wait(%r) : f32[2]
        return(%v)
      }
    }
    """
    fail = [True]

    def body(x: torch.Tensor) -> tuple[torch.Tensor]:
        if fail[0]:
            raise ValueError("the first time")
        return (x,)

    executable = VirtualExecutable(module(text), {"a.f": body}, {})
    with pytest.raises(RemoteError, match=r"ValueError on rank 0 in a\.f: the first time"):
        executable.run([[ONES], []])
    fail[0] = False
    for _ in range(2):
        assert torch.equal(executable.run([[ONES], []])[1][0], ONES)


def test_wrong_inputs_of_one_rank_leave_the_executable_usable() -> None:
    executable = VirtualExecutable(module(CHAIN), CHAIN_BODIES, {})
    with pytest.raises(InputError, match="program @2 takes 0 inputs, got 1"):
        executable.run([[torch.zeros(4)], [], [1]])
    executable.run([[torch.zeros(4)], [], []])


# -- order of turns ------------------------------------------------------------------------------


def ring(world: int, rounds: int) -> str:
    """Each rank adds its number to what it gets and passes it on, `rounds` times."""
    lines = [f"module @ring phase=scheduled world={world} {{"]
    for rank in range(world):
        lines.append(
            f"  function @a{rank}.f(i64[1]) -> (i64[1]) "
            f"{{actor = a{rank}, effect = write, kind = opaque}}"
        )
    lines += [f"  channel {r} {{ranks = {{{r},{(r + 1) % world}}}}}" for r in range(world)]
    for rank in range(world):
        left = (rank - 1) % world
        lines.append(f"  program @{rank}(%h0: i64[1]) {{")
        for i in range(rounds):
            lines += [
                f"    %y{i} = call(%h{i}) {{fn = @a{rank}.f}} : i64[1]",
                f"    %s{i} = send(%y{i}) {{chan = {rank}, peer = {(rank + 1) % world}, "
                f"seq = {i}}} : future<unit>",
                f"    %r{i} = recv() {{chan = {left}, peer = {left}, seq = {i}}} : future<i64[1]>",
                f"    %h{i + 1} = wait(%r{i}) : i64[1]",
                f"    wait(%s{i})",
            ]
        lines += [f"    return(%h{rounds})", "  }"]
    return "\n".join([*lines, "}"])


@settings(max_examples=scaled(30))
@given(st.integers(2, 5), st.integers(1, 6), st.integers(0, 2**32))
def test_results_do_not_depend_on_the_order_of_turns(world: int, rounds: int, shuffle: int) -> None:
    def run_once(seed: int | None) -> tuple[list[list[int]], dict[int, list[int]]]:
        seen: dict[int, list[int]] = {rank: [] for rank in range(world)}

        def body(rank: int) -> Any:
            def run(x: torch.Tensor) -> tuple[torch.Tensor]:
                seen[rank].append(int(x))
                return (x * 3 + rank,)

            return run

        bodies = {f"a{rank}.f": body(rank) for rank in range(world)}
        inputs = [[torch.tensor([rank])] for rank in range(world)]
        outputs = run(ring(world, rounds), inputs, bodies, shuffle=seed)
        return [[v.tolist() for v in values] for values in outputs], seen

    assert run_once(shuffle) == run_once(None)


# -- the world -----------------------------------------------------------------------------------


def test_virtual_world() -> None:
    world: World = VirtualWorld(3)
    assert (world.rank, world.size, world.is_virtual) == (0, 3, True)
    assert list(world.nodes) == [0, 0, 0]
    assert [world.plays(rank) for rank in (-1, 0, 2, 3)] == [False, True, True, False]
    assert world.broadcast("x", 2) == "x"
    assert world.allgather(1) == [1, 1, 1]
    world.barrier()
    with pytest.raises(ValueError, match="no rank 3"):
        world.broadcast("x", 3)
    with pytest.raises(ValueError, match="at least one rank"):
        VirtualWorld(0)


def test_fabric_makes_communicators() -> None:
    communicator: Communicator = VirtualFabric().communicator(0)
    communicator.progress()
    communicator.reset()
    communicator.close()


# -- ends ----------------------------------------------------------------------------------------


def test_a_rank_does_not_end_before_what_it_sent_has_arrived() -> None:
    text = CHAIN.replace("    wait(%s)\n", "")
    executable = VirtualExecutable(module(text), CHAIN_BODIES, {})
    sender, receiver, last = executable.executables
    for _ in range(2):
        sender.start([torch.zeros(4)])
        assert not sender.step()
        assert sender.position().awaited == 1
        receiver.start([])
        assert not receiver.step()
        assert sender.step()
        last.start([])
        assert last.step()
        assert receiver.step()


def test_blocked_time_is_counted_for_the_rank_that_waits() -> None:
    executable = VirtualExecutable(module(CHAIN), CHAIN_BODIES, {})
    executable.run([[torch.zeros(4)], [], []])
    sender, _, last = (e.statistics for e in executable.executables)
    assert 0 < sender.last_blocked < sender.last_total
    assert 0 < sender.bubble < 1
    assert last.executions == 1


def test_to_end_the_job_of_a_virtual_world_is_to_end_the_process() -> None:
    with pytest.raises(SystemExit, match="no way on from here"):
        VirtualWorld(2).end_job("no way on from here")
