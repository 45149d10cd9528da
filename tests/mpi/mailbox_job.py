"""The conformance suite by a communicator that a package has registered; then a step, and an error.

mpiexec -n 2 python -m tests.mpi.mailbox_job
"""

from __future__ import annotations

from typing import Any

import torch

import cg
from cg.backends.cpu.transport import CpuTransport
from cg.backends.program.executor import Executable
from cg.backends.program.linked import LinkedProgram
from cg.backends.transports import registry
from cg.launch.world import world as worlds
from tests.backends.conformance import EXECUTIONS, Case, check, patient
from tests.backends.conformance_cases import cases
from tests.stages import LinearStage


@cg.actor
class RefusingStage(LinearStage):
    """A linear stage, and a method that raises for a negative sum."""

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def refuse(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.sum()) < 0:
            raise ValueError("a negative sum")
        return x.detach() + 1


def main() -> None:
    world: Any = worlds.world()
    transport = CpuTransport(world)
    count = 0
    for case in cases():
        if case.ranks <= world.size:
            conform(case, world, transport)
            count += 1
    print(f"rank {world.rank}: {count} cases conform", flush=True)
    transport.close()
    train(world)
    fail(world)


def conform(case: Case, world: Any, transport: CpuTransport) -> None:
    module, expected = case.module(), case.expected()
    communicator = registry.create("mailbox", world, list(module.channels.values()))
    if world.rank < module.world:
        serving = dict.fromkeys(module.channels, communicator)
        linked = LinkedProgram(module, world.rank, communicators=serving)
        executable = Executable(linked)
        for execution in range(EXECUTIONS):
            given = case.inputs(execution)[world.rank]
            outputs = executable.run(given, patient(transport.pause, 20.0))
            check(outputs, expected[execution][world.rank], f"{case.name}, rank {world.rank}")
    world.barrier()
    communicator.close()


def train(world: Any) -> None:
    """A value goes by the mailbox, and its gradient comes back by it."""
    halves = [RefusingStage.on(rank)(rank) for rank in (0, 1)]
    plain = torch.nn.ModuleList([RefusingStage(rank) for rank in (0, 1)])

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = halves[1].forward(cg.via(halves[0].forward(x), "mailbox")).square().sum()
        cg.backward(loss)
        return loss

    x = torch.ones(2, 4)
    compiled = step.lower(x).compile()
    vias = sorted(str(channel.via) for channel in compiled.module.channels.values())
    wanted = plain[1](plain[0](x)).square().sum()
    wanted.backward()
    torch.testing.assert_close(compiled(x), wanted.detach())
    mine = halves[world.rank].local
    for parameter, right in zip(mine.parameters(), plain[world.rank].parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, right.grad)
    print(f"rank {world.rank}: a step by {vias}", flush=True)
    compiled.close()


def fail(world: Any) -> None:
    """An error of a method reaches both ranks, and the step can be called again."""
    halves = [RefusingStage.on(rank)(rank) for rank in (0, 1)]

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        return halves[1].forward(cg.via(halves[0].refuse(x), "mailbox"))

    compiled = step.lower(torch.ones(2, 4)).compile()
    first = compiled(torch.ones(2, 4))
    try:
        compiled(-torch.ones(2, 4))
    except cg.RemoteError as error:
        print(f"rank {world.rank}: {error.type_name}, {error.failure.message}", flush=True)
    assert torch.equal(compiled(torch.ones(2, 4)), first)
    compiled.close()
    print(f"rank {world.rank}: called again", flush=True)


if __name__ == "__main__":
    main()
