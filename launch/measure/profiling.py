"""`cg.profile`: when each instruction of each execution ran, on every rank, in one trace file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Self
from weakref import WeakSet

from ...backends.agreement.plan_hash import plan_hash
from ...backends.base import World
from ...backends.per_world import PerWorld
from ...backends.program.tracing import Budget, InstructionLog, Range, Recordable, device_ranges
from ...ir.ops.module import Module
from ...passes.simulate.program_times import ProgramTimes
from ..pictures.model import Picture, one_above_the_other
from ..pictures.perfetto import write_trace
from ..pictures.program_timeline import picture_of_programs
from ..pictures.recorded_timeline import ProgramRecord, Records, picture_of_records
from ..pictures.write import write_picture
from ..world.clocks import ClockReading, compare_clocks
from ..world.world import world
from .manifest import ProcessFacts, StepFacts, facts_of_process, manifest

LIMIT = 2_000_000
"""The most instructions that a process records; each takes 70 bytes, and 200 in the file."""


@dataclass(eq=False)
class ProfiledPrograms:
    """The programs of one compiled step that this process runs.

    Attributes:
        number: of the step among all that were compiled, the same on all ranks.
        module: scheduled.
        bound: for each rank that this process plays, its programs.
    """

    number: int
    module: Module
    bound: Mapping[int, Sequence[Recordable]]


class _CompiledSteps:
    """All steps of a world that have been compiled and are still in use."""

    def __init__(self) -> None:
        self.steps: WeakSet[ProfiledPrograms] = WeakSet()
        self.count = 0
        self.profile: Profile | None = None


_compiled: PerWorld[_CompiledSteps] = PerWorld()


def watch(
    world: World, module: Module, bound: Mapping[int, Sequence[Recordable]]
) -> ProfiledPrograms:
    """Let profiles record a step that has been compiled; on all ranks, in the same order.

    Returns:
        The entry of the step; the step can be recorded as long as the caller holds it.
    """
    world_watch = _compiled.of(world, _CompiledSteps)
    watched = ProfiledPrograms(world_watch.count, module, bound)
    world_watch.count += 1
    world_watch.steps.add(watched)
    if world_watch.profile is not None:
        world_watch.profile.include(watched)
    return watched


class Profile:
    """A recording of what ranks do in a `with` block, and the files and pictures of it.

    Attributes:
        trace: the trace, for https://ui.perfetto.dev or chrome://tracing.
        manifest: JSON that says what was run, on what, and how exact the clocks are.
    """

    def __init__(self, world: World, trace: Path, limit: int) -> None:
        self.trace = trace
        self.manifest = _manifest_of(trace)
        self._world = world
        self._budget = Budget(limit)
        self._ranges: Range | None = None
        self._steps: dict[int, ProfiledPrograms] = {}
        self._logs: dict[tuple[int, int, int], InstructionLog] = {}
        self._first: list[ClockReading] = []
        self._began = 0.0
        self._records: Records | None = None

    def __enter__(self) -> Self:
        world_watch = _compiled.of(self._world, _CompiledSteps)
        if world_watch.profile is not None:
            raise RuntimeError(
                f"a profile is being recorded already, to {world_watch.profile.trace}: "
                "end that first"
            )
        self._first = compare_clocks(self._world)
        self._ranges = device_ranges()
        self._began = perf_counter()
        world_watch.profile = self
        for watched in tuple(world_watch.steps):
            self.include(watched)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _compiled.of(self._world, _CompiledSteps).profile = None
        for watched in self._steps.values():
            for programs in watched.bound.values():
                for program in programs:
                    program.record(None)
        self._budget.left = 0
        if error is None:
            self._gather()
        elif isinstance(error, Exception):
            self._keep_own()

    def include(self, watched: ProfiledPrograms) -> None:
        """Record a step from its next execution on."""
        self._steps[watched.number] = watched
        for rank, programs in watched.bound.items():
            for context, program in enumerate(programs):
                log = InstructionLog(program.program, self._budget, self._ranges)
                self._logs[watched.number, context, rank] = log
                program.record(log)

    # -- pictures ---------------------------------------------------------------------------

    def picture(self, step: str | None = None, execution: int = -1) -> Picture:
        """One execution as a timeline; on rank 0, after the block.

        Args:
            step: name of the step; if None, the one that was compiled last of those that ran.
            execution: its number, as in the trace; negative ones count from the last.

        Raises:
            ValueError: nothing like that was recorded, or this is not rank 0.
        """
        records = self._recorded()
        number = self._step(records, step)
        numbers = records.executions(number)
        if execution < 0 and -execution <= len(numbers):
            execution = numbers[execution]
        if execution not in numbers:
            raise ValueError(f"execution {execution} was not recorded; there are {_runs(numbers)}")
        name = records.modules[number].name
        return picture_of_records(
            records.only(number, execution),
            f"@{name}, execution {execution}",
            f"measured, clocks within {_micros(self._uncertainty(records))}",
        )

    def visualize(
        self,
        path: Path | str,
        step: str | None = None,
        execution: int = -1,
        predicted: ProgramTimes | None = None,
    ) -> None:
        """Draw one execution as a timeline, below its prediction if one is given.

        It does nothing on ranks other than 0.

        Args:
            path: ends in `.svg` or `.html`, or in `.json` for a trace.
            step, execution: as in `picture`.
            predicted: the result of `compiled.simulate` for that step.

        Raises:
            ValueError: nothing like that was recorded, or the path ends in something else.
        """
        if self._world.rank:
            return
        picture = self.picture(step, execution)
        if predicted is not None:
            records = self._recorded()
            module = records.modules[self._step(records, step)]
            picture = one_above_the_other(picture_of_programs(predicted, module), picture)
        write_picture(picture, Path(path))

    def _recorded(self) -> Records:
        if self._records is None:
            raise ValueError(
                "there is nothing to draw here: pictures are made on rank 0, after the block of "
                "cg.profile has ended without an exception"
            )
        return self._records

    def _step(self, records: Records, name: str | None) -> int:
        ran = sorted({record.step for record in records.programs if record.events})
        matches = [n for n in ran if name is None or records.modules[n].name == name]
        if not matches:
            names = ", ".join(f"'{records.modules[n].name}'" for n in ran) or "nothing"
            raise ValueError(f"no step '{name or ''}' has run inside the profile; it saw {names}")
        return matches[-1]

    # -- files ------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Send all records to rank 0, which writes them; collective."""
        seconds = perf_counter() - self._began
        last = compare_clocks(self._world)
        count = 1 if self._world.is_virtual else self._world.size
        processes = self._world.allgather(self._process_facts())[:count]
        programs: list[ProgramRecord] = []
        for root in range(count):
            own = self._own() if root == self._world.rank else None
            part = self._world.broadcast(own, root)
            programs += part if self._world.rank == 0 else ()
        if self._world.rank == 0:
            self._write(programs, processes, last, seconds)

    def _keep_own(self) -> None:
        """Write this rank's own records: after an exception, ranks may not meet again."""
        rank = self._world.rank
        if rank:
            self.trace = self.trace.with_name(f"{self.trace.stem}.rank{rank}.json")
            self.manifest = _manifest_of(self.trace)
        seconds = perf_counter() - self._began
        self._write(self._own(), [self._process_facts()], self._first, seconds)

    def _own(self) -> list[ProgramRecord]:
        return [
            ProgramRecord(step, context, rank, log.origins, log.events, log.left_out)
            for (step, context, rank), log in sorted(self._logs.items())
            if log.events or log.left_out
        ]

    def _process_facts(self) -> ProcessFacts:
        logs = self._logs.values()
        recorded = sum(len(log.events) // 4 for log in logs)
        return facts_of_process(recorded, sum(log.left_out for log in logs))

    def _write(
        self,
        programs: Sequence[ProgramRecord],
        processes: Sequence[ProcessFacts],
        last: Sequence[ClockReading],
        seconds: float,
    ) -> None:
        modules = {number: watched.module for number, watched in self._steps.items()}
        records = Records(tuple(programs), modules, tuple(self._first), tuple(last))
        self._records = records
        steps = [
            StepFacts(number, module.name, plan_hash(module), len(records.executions(number)))
            for number, module in sorted(modules.items())
            if any(record.step == number for record in programs)
        ]
        about = manifest(self._world, self.trace, steps, processes, (self._first, last), seconds)
        names = ", ".join(dict.fromkeys(f"@{step.name}" for step in steps))
        note = f"measured, clocks within {_micros(self._uncertainty(records))}"
        picture = picture_of_records(records, names or "nothing has run", note)
        write_trace(picture, self.trace, {"manifest": self.manifest.name})
        self.manifest.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def _uncertainty(records: Records) -> int:
        return max(reading.uncertainty for reading in (*records.first, *records.last))


def profile(path: Path | str, *, limit: int = LIMIT) -> Profile:
    """Record what every rank does while a `with` block lasts; collective, at both ends of it.

    Every instruction of every execution of compiled steps and graphs is recorded: when it began and
    ended, on which stream, of which op and which source line. At the end rank 0 writes one trace
    for https://ui.perfetto.dev and chrome://tracing. It has a process for each rank and a thread
    for each stream, all on one clock. Beside it rank 0 writes a manifest that says what was run.
    Outside of the block nothing is recorded, and recording costs nothing. Where CUDA is available,
    instructions are NVTX ranges as well.

    Ranks that serve a graph enter the block before they serve, and leave it after. If the block
    ends with an exception, each rank writes its own records, with clocks as they were at the start.
    Ranks other than 0 write to `trace.rank1.json` and so on.

    Args:
        path: a file that ends in `.json`, or a folder, for `trace.json` and `manifest.json` in it.
            They are made if they do not exist.
        limit: the most instructions that a process records. Later ones are only counted, and the
            manifest has their number.

    Returns:
        The recording, to be entered by `with`; it draws timelines once the block has ended.

    Raises:
        RuntimeError: a profile is being recorded already.
        ValueError: `limit` is less than 1.
    """
    if limit < 1:
        raise ValueError(f"limit={limit}: a profile records at least 1 instruction")
    path = Path(path)
    trace = path if path.suffix == ".json" else path / "trace.json"
    return Profile(world(), trace, limit)


def _manifest_of(trace: Path) -> Path:
    if trace.name.startswith("trace."):
        return trace.with_name("manifest" + trace.name.removeprefix("trace"))
    return trace.with_name(f"{trace.stem}.manifest.json")


def _micros(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e3:.3g} µs"


def _runs(numbers: Sequence[int]) -> str:
    """Ascending numbers in few words."""
    if not numbers:
        return "none"
    return f"{len(numbers)} of them, from {numbers[0]} to {numbers[-1]}"
