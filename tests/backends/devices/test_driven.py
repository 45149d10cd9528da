"""Work on streams of a program that one rank drives, beside that of all programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cg.backends.devices.programs.driven import DrivenBinder, HostHandshake
from cg.backends.fake.device import FakeDevice
from cg.backends.fake.library import FakeLibrary
from cg.backends.nccl.communicator import NcclCommunicator
from cg.backends.nccl.pool import NcclPool
from cg.backends.program.linked import LinkedProgram
from cg.backends.program.ticket_locks import (
    TicketLocks,
    Tickets,
)
from cg.ir.attributes import Stream
from cg.ir.ops.module import (
    Module,
)
from cg.ir.text.parser import (
    parse_module,
)
from tests.backends.devices.patience import loose_device

from ..conformance_cases import one_way
from .ranks import HostCommunicator, ThreadWorld, on_ranks, pause


def execute(world: ThreadWorld, module: Module, inputs: list[torch.Tensor]) -> FakeDevice:
    """Run this rank's program once; the device that it ran on."""
    device = loose_device(world.rank)
    pool = NcclPool(world, device, FakeLibrary(device))
    streams = NcclCommunicator(pool, list(module.channels.values()), world.rank)
    host = HostCommunicator(*world.shared["host"], world.rank)
    handshakes = {
        id_: HostHandshake(host, replace(channel, id=100 + id_, via=None))
        for id_, channel in module.channels.items()
    }
    linked = LinkedProgram(module, world.rank, {}, {}, dict.fromkeys(module.channels, streams))
    tickets = Tickets(TicketLocks())
    binder = DrivenBinder(linked, tickets, device=device, handshakes=handshakes)
    code = binder.bind()
    code.registers[:] = code.template
    code.registers[: len(inputs)] = inputs
    tickets.take()
    for instruction in code.instructions:
        while not instruction():
            pause(0)
    return device


def test_an_input_is_sent_behind_its_landing() -> None:
    case = one_way("message", "f32[8]", 2)
    module = case.module("fake")

    def play(world: ThreadWorld) -> tuple[list[str], list[str]]:
        device = execute(world, module, case.inputs(0)[world.rank])
        found = device.queues.get(Stream.SEND)
        return device.stream(Stream.COMPUTE).log, [] if found is None else found.log

    (compute, sends), _ = on_ranks(2, play)
    at = sends.index("send 32")
    assert sends[at - 1].replace("wait", "record") == compute[0], (compute, sends)


SENT = """
module @sent phase=scheduled world=2 {
  channel 0 {ranks = {0..1}, via = fake}
  program @0(%x: f32[8]) {
    %d = send(%x) {chan = 0, peer = 1, seq = 0, stream = send} : future<unit>
    %s = wait(%d) {stream = STREAM} : unit
    return()
  }
  program @1() {
    %r = recv() {chan = 0, peer = 0, seq = 0, stream = recv} : future<f32[8]>
    %v = wait(%r) {stream = compute} : f32[8]
    return(%v)
  }
}
"""


@pytest.mark.parametrize("stream", ["compute", "send", "collective"])
def test_an_input_may_be_written_to_at_the_end_wherever_its_send_was_awaited(stream: str) -> None:
    module = parse_module(SENT.replace("STREAM", stream))

    def play(world: ThreadWorld) -> bool:
        inputs = [torch.ones(8)] if world.rank == 0 else []
        device = execute(world, module, inputs)
        log = device.stream(Stream.COMPUTE).log
        return any(entry.startswith("wait") for entry in log)

    assert on_ranks(2, play) == [True, True]
