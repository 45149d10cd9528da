"""The order in which a program's work is put on streams, and what is said when it cannot be."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from cg.backends.devices.programs.capture import WARM_UPS
from cg.backends.devices.programs.executable import DeviceExecutable
from cg.backends.errors import BindError, TransportError
from cg.backends.fake.library import FakeLibrary
from cg.backends.nccl.library import load
from cg.backends.nccl.pool import LIMIT, NcclPool
from cg.ir.attributes import Stream
from cg.ir.ops.module import (
    Channel,
)
from cg.ir.text.parser import (
    parse_module,
)
from cg.passes.lower.capture import Capture
from cg.passes.manager.manager import PassManager
from tests.backends.devices.patience import loose_device

from ..conformance import Case
from ..conformance_cases import pipeline
from .ranks import ThreadWorld, bound, on_ranks, pause


def test_a_send_waits_for_its_operand_and_the_caller_for_all() -> None:
    case = pipeline("p", 2, 1)

    def play(world: ThreadWorld) -> list[str]:
        executable = bound(world, case.module(), delay=0.002)
        executable.run(case.inputs(0)[world.rank], pause)
        logs = world.device.queues
        return [] if Stream.SEND not in logs else logs[Stream.SEND].log

    log, _ = on_ranks(2, play)
    what = [entry.split()[0] for entry in log]
    at = what.index("send", what.index("send") + 1)  # the first one only warms the line
    assert what[at - 1 : at + 2] == ["wait", "send", "record"]


def test_the_host_is_not_held_up() -> None:
    case = pipeline("p", 2, 6)

    def play(world: ThreadWorld) -> int:
        executable = bound(world, case.module())
        before = world.device.synchronized
        executable.run(case.inputs(0)[world.rank], pause)
        return int(world.device.synchronized - before)

    assert on_ranks(2, play) == [0, 0]


FREED = """
module @freed phase=scheduled world=2 {
  channel 0 {ranks = {0..1}, via = fake}
  program @0(%x: f32[4]) {
    %h = copy(%x) {stream = compute} : f32[4]
    %h.there = wait(%h) {stream = send} : f32[4]
    %d = send(%h.there) {chan = 0, peer = 1, seq = 0, stream = send} : future<unit>
    %s = wait(%d) {stream = send} : unit
    free(%h, %s)
    return()
  }
  program @1() {
    %r = recv() {chan = 0, peer = 0, seq = 0, stream = recv} : future<f32[4]>
    %v = wait(%r) {stream = compute} : f32[4]
    return(%v)
  }
}
"""


def test_memory_is_used_again_behind_what_its_free_names() -> None:
    """The free is on the compute stream, and what it names has been awaited on another one."""

    def waits(text: str) -> int:
        def play(world: ThreadWorld) -> int:
            executable = bound(world, parse_module(text))
            executable.run([[torch.ones(4)], []][world.rank], pause)
            log = world.device.queues[Stream.COMPUTE].log
            return sum(entry.startswith("wait") for entry in log)

        return int(on_ranks(2, play)[0])

    assert waits(FREED) == waits(FREED.replace("free(%h, %s)", "free(%h)")) + 1


def captured(world: ThreadWorld, case: Case) -> DeviceExecutable:
    """A case's program on this rank, whole in one graph, all of its messages between devices."""
    module = case.module()
    for id_, channel in module.channels.items():
        module.channels[id_] = replace(channel, via="fake")
    PassManager((Capture("fake+fake"),)).run(module)
    return bound(world, module)


def test_memory_is_given_back_once_and_then_captured() -> None:
    case = pipeline("p", 2, 2)

    def play(world: ThreadWorld) -> list[tuple[int, int]]:
        executable = captured(world, case)
        found = []
        for execution in range(WARM_UPS + 3):
            executable.run(case.inputs(execution)[world.rank], pause)
            captures = sum(segment.captures for segment in executable.segments)
            found.append((world.device.given_back, captures))
            world.barrier()
        return found

    for found in on_ranks(2, play):
        assert found[:WARM_UPS] == [(0, 0)] * WARM_UPS
        assert [given_back for given_back, _ in found[WARM_UPS:]] == [1] * 3
        assert found[WARM_UPS][1] > 0


def test_a_rehearsal_has_no_messages() -> None:
    case = pipeline("p", 2, 2)

    def play(world: ThreadWorld) -> list[int]:
        executable = captured(world, case)
        counts = []
        for execution in range(WARM_UPS + 1):
            before = len(world.library.calls)
            executable.run(case.inputs(execution)[world.rank], pause)
            counts.append(len(world.library.calls) - before)
            world.barrier()
        return counts

    for counts in on_ranks(2, play):
        assert counts[0] > 0
        assert counts == [counts[0]] * len(counts)


def test_a_rank_is_a_member_of_so_many_communicators() -> None:
    channels = [Channel(i, (0, i + 1)) for i in range(LIMIT + 1)]

    class Alone(ThreadWorld):
        def allgather(self, value: object) -> list[object]:
            return [value] * self.size

    device = loose_device()
    pool = NcclPool(Alone(0, LIMIT + 2, {}), device, FakeLibrary(device))
    with pytest.raises(BindError, match=f"rank 0 would be a member of {LIMIT + 1} NCCL"):
        pool.join(channels)


def test_a_rank_without_a_device_is_not_joined() -> None:
    def play(world: ThreadWorld) -> None:
        device = loose_device() if world.rank == 0 else None
        pool = NcclPool(world, device, None if device is None else FakeLibrary(device))
        pool.join([Channel(0, (0, 1))])

    with pytest.raises(BindError, match="from rank 0 to rank 1, but rank 1 has no GPU"):
        on_ranks(2, play)


def test_a_binding_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl", None)
    with pytest.raises(TransportError, match=r"cannot be loaded(.|\n)*pip install 'cg\[cuda\]'"):
        load()
