"""Runs the conformance suite of communicators on the ranks of a job.

    mpiexec -n 4 python -m tests.mpi.conformance_job cpu
    mpiexec -n 2 python -m tests.mpi.conformance_job fake --capture
    mpiexec -n 2 python -m tests.mpi.conformance_job nccl --capture
    mpiexec -n 2 python -m tests.mpi.conformance_job nccl --nonblocking --capture

A name is a transport: `cpu`, `fake`, or `nccl`. Each case that fits into the job runs
with each transport, several times; with `--capture` what a device can replay is replayed. With
`--nonblocking` NCCL's calls return before they are done. With `--strict` the fake device waits in
all calls.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

import torch

from cg.backends.cpu.transport import CpuTransport
from cg.backends.devices.programs.executable import DeviceExecutable
from cg.backends.fake.device import FABRIC, FakeDevice
from cg.backends.fake.library import FakeLibrary
from cg.backends.nccl.communicator import NcclCommunicator, make_pool
from cg.backends.nccl.pool import NcclPool
from cg.backends.program.executor import Executable
from cg.backends.program.linked import LinkedProgram
from cg.ir.ops.module import Module
from cg.launch.world import world as worlds
from cg.passes.lower.capture import Capture
from cg.passes.manager.manager import PassManager
from tests.backends.conformance import EXECUTIONS, Case, check, patient
from tests.backends.conformance_cases import cases
from tests.backends.devices.patience import PATIENCE


def main() -> None:
    names = [name for name in sys.argv[1:] if not name.startswith("--")]
    capture = "--capture" in sys.argv
    world: Any = worlds.world()
    transport = CpuTransport(world)
    for name in names:
        began = time.perf_counter()
        runner = Runner(world, transport, name, capture)
        count = 0
        for case in cases():
            if case.ranks <= world.size and runner.serves(case):
                runner.run(case)
                count += 1
        runner.close()
        assert bool(runner.replays) == runner.capture, f"{runner.replays} replays"
        seconds = time.perf_counter() - began
        if world.rank == 0:
            print(
                f"{name}: {count} cases conform, {runner.replays} replays, {seconds:.1f} s",
                flush=True,
            )
    transport.close()


class Runner:
    """One transport."""

    def __init__(self, world: Any, transport: CpuTransport, name: str, capture: bool) -> None:
        self.world = world
        self.transport = transport
        self.name = name
        self.capture = capture and name != "cpu"
        self.pool: NcclPool | None = None
        self.replays = 0
        self.device: Any = None
        if name == "fake":
            strict = "--strict" in sys.argv
            self.device = world.device = FakeDevice(world.rank, 0.0, strict, PATIENCE)
            self.pool = NcclPool(world, self.device, FakeLibrary(self.device))
        elif name != "cpu":
            self.device = world.device
            assert self.device is not None, "this rank has no device; is CG_DEVICE=cpu set?"
            self.pool = make_pool(world, nonblocking="--nonblocking" in sys.argv)

    def serves(self, case: Case) -> bool:
        if self.name == "cpu":
            return True
        assert self.device is not None
        fabric = self.device.fabric or FABRIC
        return not case.objects and (case.reduces is None or case.reduces in fabric.reduces)

    def run(self, case: Case) -> None:
        on_device = self.device is not None
        module = case.module("nccl" if on_device else None, in_one_order=on_device)
        rank = self.world.rank
        expected = case.expected()
        if self.capture:
            for id_, channel in module.channels.items():
                module.channels[id_] = replace(channel, via="stream")
            PassManager((Capture("+".join(["stream"] * module.world)),)).run(module)
        executable, communicator = self._bind(module)
        try:
            for execution in range(2 * EXECUTIONS):
                if executable is not None:
                    self._execute(executable, case, expected, execution % EXECUTIONS, rank)
                self.world.barrier()
        except BaseException as error:
            error.add_note(f"{case.name} by {self.name}, rank {rank}")
            raise
        if isinstance(executable, DeviceExecutable):
            self.replays += sum(segment.replays for segment in executable.segments)
            reasons = [segment.reason for segment in executable.segments if segment.reason]
            assert not reasons, f"{case.name}: {reasons}"
            assert all(segment.replays for segment in executable.segments), case.name
            executable.drop_graphs()
        communicator.close()

    def _bind(self, module: Module) -> tuple[Executable | None, Any]:
        channels = list(module.channels.values())
        rank = self.world.rank
        communicator: Any
        if self.pool is None:
            communicator = self.transport.communicator(self.world, channels)
        else:
            communicator = NcclCommunicator(self.pool, channels, rank)
        if rank >= module.world:
            return None, communicator
        serving = dict.fromkeys(module.channels, communicator)
        linked = LinkedProgram(module, rank, communicators=serving)
        if self.pool is None:
            return Executable(linked), communicator
        return DeviceExecutable(linked, self.device), communicator

    def _execute(
        self, executable: Executable, case: Case, expected: Any, execution: int, rank: int
    ) -> None:
        outputs = executable.run(case.inputs(execution)[rank], patient(self.transport.pause, 30.0))
        for value in outputs:
            if isinstance(value, torch.Tensor) and self.device is not None:
                assert value.device == self.device.torch_device, f"{value.device}"
        check(outputs, expected[execution][rank], f"{case.name}, {self.name}, rank {rank}")

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


if __name__ == "__main__":
    main()
