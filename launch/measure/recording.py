"""Run a scheduled module with a clock at every call, on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeAlias

from ...backends.base import World
from ...backends.device import Device, Event
from ...backends.program.code import Code
from ...backends.program.instructions import Instruction
from ...backends.program.linked import LinkedModule
from ...ir.attributes import Stream
from ...ir.ops.clone import clone
from ...ir.ops.module import Module
from ...ir.verify.communication import TimeSpan
from ...passes.simulate.memory_plan import memory_plan
from ...passes.simulate.program_times import ProgramTimes, RankTimes
from ..runtime.numbering import Numbering
from ..runtime.runtime import make_runtime
from ..world.comparison import CallFacts

Stamps: TypeAlias = dict[int, tuple[float, float]]
"""The start and end of calls of a program, in seconds, by place in the program."""

Marks: TypeAlias = dict[int, tuple[Any, Any]]
"""The start and end of calls, as marks of a clock, by place in the program."""


CLOSE = 1e-3
"""Seconds within which the host's clock and a device's are read for one time."""
ATTEMPTS = 10


class Clock:
    """The host's clock."""

    def start(self) -> float:
        """Begin an execution; the time, in seconds of `perf_counter`."""
        return perf_counter()

    def now(self) -> Any:
        """A mark of the time, which `read` turns into seconds."""
        return perf_counter()

    def read(self, marks: Marks) -> Stamps:
        """The times of marks, in seconds of `perf_counter`; waits until they have passed."""
        return dict(marks)


class DeviceClock(Clock):
    """The clock of a device's compute stream, by its events."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._compute = device.stream(Stream.COMPUTE)
        self._zero = 0.0
        self._first = device.timer()

    def start(self) -> float:
        """Wait for the device, and record the event that times count from.

        The host's time of the event is known as well as the calls around it are short. Where the
        host or the device was kept from its work meanwhile, another event is recorded.
        """
        self._device.synchronize()
        for _ in range(ATTEMPTS):
            began = perf_counter()
            self._first.record(self._compute)
            self._device.synchronize()
            self._zero = perf_counter()
            if self._zero - began < CLOSE:
                break
        return self._zero

    def now(self) -> Event:
        """Record an event on the compute stream."""
        event = self._device.timer()
        event.record(self._compute)
        return event

    def read(self, marks: Marks) -> Stamps:
        """Wait for the device; the times of the events."""
        self._device.synchronize()
        return {index: (self._at(start), self._at(end)) for index, (start, end) in marks.items()}

    def _at(self, event: Event) -> float:
        return self._zero + self._device.elapsed(self._first, event) / 1e3


class CallLog:
    """Times the calls of a program in its last execution; a `ProgramLog`.

    Args:
        clock: times them.

    Attributes:
        marks: the start and end of each call, by place in the program.
    """

    def __init__(self, clock: Clock) -> None:
        self.marks: Marks = {}
        self._now = clock.now

    def wrap(self, code: Code) -> list[Instruction]:
        """Instructions that do what those of `code` do, and time calls."""
        return [
            instruction if info.function is None else self._timed(instruction, info.op)
            for instruction, info in zip(code.instructions, code.infos, strict=True)
        ]

    def _timed(self, instruction: Instruction, op: int) -> Instruction:
        marks, now = self.marks, self._now

        def run() -> bool:
            start = now()
            done = instruction()
            marks[op] = (start, now())
            return done

        return run


@dataclass(frozen=True)
class RecordedTimes(ProgramTimes):
    """The times of a step's programs when they ran; `spans` are those of calls.

    `exposed` is NaN, since the recording does not show which messages a rank waited for. Each
    machine's clock begins when its first rank left a barrier just before.
    """


def record(
    world: World,
    linked: LinkedModule,
    parameters: Sequence[str],
    inputs: Callable[[], Sequence[Any]],
    executions: int,
    call: CallFacts | None = None,
    *,
    timeout: float | None = None,
) -> list[RecordedTimes]:
    """Run a module several times, and record when each call of each rank ran; collective.

    A rank with a device times a call by the device's clock, from its start to its end on the
    compute stream. Other ranks time it on the host. Nothing is captured.

    Args:
        world: all ranks.
        linked, parameters, timeout: as `make_runtime` takes them.
        inputs: gives the values of the step's parameters.
        executions: how often to run it.
        call: as `make_runtime` takes it; None if this is no step.

    Returns:
        A recording of each execution, the same on all ranks.

    Raises:
        RemoteError: a method raised, on any rank.
    """
    module = linked.module
    ranks = [rank for rank in range(module.world) if world.plays(rank)]
    clock = Clock() if world.device is None else DeviceClock(world.device)
    plain = clone(module)
    for op in (op for program in plain.programs for op in program.ops):
        op.graph = None  # a call that is replayed cannot be timed
    runtime = make_runtime(
        world,
        replace(linked, module=plain, fallbacks=None),
        parameters,
        timeout=timeout,
        numbering=Numbering(),
        call=call,
    )
    logs = {rank: CallLog(clock) for rank in ranks}
    for rank, programs in runtime.bound.items():
        for program in programs:
            program.record(logs[rank])
    timings: list[tuple[float, dict[int, Stamps]]] = []
    try:
        for _ in range(executions):
            world.barrier()
            zero = clock.start()
            runtime.run(inputs)
            timings.append((zero, {rank: clock.read(logs[rank].marks) for rank in ranks}))
    finally:
        runtime.close()
    everywhere = world.allgather(timings)
    peaks = [memory_plan(module, rank).peak for rank in range(module.world)]
    return [
        _recording(module, world.nodes, [of_rank[number] for of_rank in everywhere], peaks)
        for number in range(executions)
    ]


def _recording(
    module: Module,
    nodes: Sequence[int],
    everywhere: Sequence[tuple[float, dict[int, Stamps]]],
    peaks: Sequence[int],
) -> RecordedTimes:
    """The recording of one execution, from the stamps of each process."""
    zeros: dict[int, float] = {}
    for node, (zero, _) in zip(nodes, everywhere, strict=True):
        zeros[node] = min(zero, zeros.get(node, math.inf))
    stamps = {rank: own for _, of_ranks in everywhere for rank, own in of_ranks.items()}
    ranks: list[RankTimes] = []
    spans: list[TimeSpan] = []
    for program, peak in zip(module.programs, peaks, strict=True):
        rank = program.rank or 0
        zero = zeros[nodes[rank]]
        own = [
            TimeSpan(rank, program.ops[index], (start - zero) * 1e3, (end - zero) * 1e3)
            for index, (start, end) in sorted(stamps[rank].items())
        ]
        first, last = (own[0].start, own[-1].end) if own else (0.0, 0.0)
        busy = sum(span.end - span.start for span in own)
        blocked = max(0.0, last - first - busy)
        ranks.append(RankTimes(rank, first, last, busy, blocked, math.nan, peak))
        spans += own
    return RecordedTimes(tuple(ranks), tuple(spans))
