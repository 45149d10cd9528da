"""Runs the conformance suite by HCCL on the ranks of a job: over the mock, or on real NPUs.

    mpiexec -n 2 python -m tests.backends.hccl.conformance_job

Each case runs as it is first, and is then captured and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cg.backends.cpu.transport import CpuTransport
from cg.backends.devices.programs.capture import WARM_UPS
from cg.backends.devices.programs.executable import DeviceExecutable
from cg.backends.hccl.collectives import REDUCES
from cg.backends.hccl.communicator import HcclCommunicator, make_pool
from cg.backends.hccl.pool import HcclPool
from cg.backends.program.linked import LinkedProgram
from cg.ir.types import DType
from cg.launch.environment.config import config
from cg.launch.world import world as worlds
from cg.passes.lower.capture import Capture
from cg.passes.manager.manager import PassManager
from tests.backends.conformance import EXECUTIONS, Case, check, patient
from tests.backends.conformance_cases import cases

TIMES = WARM_UPS + 2


def main(*, less: bool = False) -> None:
    world: Any = worlds.world()
    transport = CpuTransport(world)
    pool = make_pool(world, config().hccl_library)
    count = replays = 0
    for case in served(world.size, less=less):
        replays += run(case, world, transport, pool)
        count += 1
    pool.close()
    print(f"rank {world.rank}: {count} cases conform, {replays} replays", flush=True)
    transport.close()


def served(size: int, *, less: bool = False) -> Iterator[Case]:
    """The cases of tensors that HCCL serves, on so many ranks; `less` reduces float32 alone."""
    reduced = (DType.F32,) if less else REDUCES
    for case in cases((size,)):
        if not case.objects and (case.reduces is None or case.reduces in reduced):
            yield case


def run(case: Case, world: Any, transport: CpuTransport, pool: HcclPool) -> int:
    """Each execution of a case gives what it gives in the virtual world; how many were replays."""
    module, expected = case.module("hccl", rendezvous="hccl"), case.expected()
    PassManager((Capture("+".join(["hccl"] * module.world), rendezvous="hccl"),)).run(module)
    executable = None
    communicator = HcclCommunicator(pool, list(module.channels.values()), world.rank)
    if world.rank < module.world:
        serving: dict[int, Any] = dict.fromkeys(module.channels, communicator)
        linked = LinkedProgram(module, world.rank, communicators=serving)
        executable = DeviceExecutable(linked, world.device)
    for execution in (i % EXECUTIONS for i in range(TIMES)):
        if executable is not None:
            given = case.inputs(execution)[world.rank]
            try:
                outputs = executable.run(given, patient(transport.pause, 20.0))
                check(outputs, expected[execution][world.rank], f"rank {world.rank}")
            except BaseException as error:
                error.add_note(f"{case.name} by HCCL, rank {world.rank}")
                raise
        world.barrier()
    segments = () if executable is None else executable.segments
    assert not any(segment.reason for segment in segments), [s.reason for s in segments]
    if executable is not None:
        executable.drop_graphs()
    communicator.close()
    return sum(segment.replays for segment in segments)


if __name__ == "__main__":
    main()
