"""Make a picture of the instructions that ranks have recorded."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from ...backends.program.tracing import InstructionOrigin
from ...ir.ops import Recv, Send
from ...ir.ops.module import Module
from ..world.clocks import ClockReading, common_time
from .model import NUDGE, Picture, TimeSlice, TrackKey, lay_out
from .op_boxes import OpBoxes

Which: TypeAlias = tuple[int, int]
"""An execution: index of its record, and its number."""


@dataclass(frozen=True, slots=True)
class ProgramRecord:
    """The recording of one bound program of one rank.

    Attributes:
        step: number of the compiled step, the same on all ranks.
        context: index of the execution context of a driven graph that it belongs to; else 0.
        rank: whose program it is.
        origins, events, left_out: as in `InstructionLog`.
    """

    step: int
    context: int
    rank: int
    origins: tuple[InstructionOrigin, ...]
    events: array[int]
    left_out: int


@dataclass(frozen=True, slots=True)
class Records:
    """The recordings of all ranks, with their modules and clocks.

    Attributes:
        programs: of all ranks.
        modules: scheduled, by the number of the compiled step.
        first, last: readings of each rank's clock, from before and after.
    """

    programs: tuple[ProgramRecord, ...]
    modules: Mapping[int, Module]
    first: tuple[ClockReading, ...]
    last: tuple[ClockReading, ...]

    def only(self, step: int, execution: int) -> Records:
        """One execution of one step."""
        programs = []
        for record in self.programs:
            if record.step == step:
                chosen = array("q")
                for at in range(0, len(record.events), 4):
                    if record.events[at + 1] == execution:
                        chosen.extend(record.events[at : at + 4])
                if chosen:
                    programs.append(replace(record, events=chosen, left_out=0))
        return replace(self, programs=tuple(programs))

    def executions(self, step: int) -> list[int]:
        """The numbers of the executions of a step that have left a trace, ascending."""
        numbers = set[int]()
        for record in self.programs:
            if record.step == step:
                numbers.update(record.events[1::4])
        return sorted(numbers)


def picture_of_records(records: Records, title: str, note: str) -> Picture:
    """A row for each rank, a track for each stream, a slice for each instruction.

    Where executions overlap on a rank, each has tracks of its own.
    """
    zero = min((began for _, _, _, began, _ in _events(records)), default=0.0)
    instructions = [
        _instructions(record, records.modules[record.step]) for record in records.programs
    ]
    boxes: list[tuple[Which, TimeSlice]] = []
    spans: dict[int, dict[Which, tuple[float, float]]] = defaultdict(dict)
    tails: dict[_MessageKey, tuple[Which, TimeSlice]] = {}
    heads: dict[_MessageKey, tuple[Which, TimeSlice]] = {}
    for index, instruction, execution, began, ended in _events(records):
        which, record = (index, execution), records.programs[index]
        box, message = instructions[index][instruction]
        start, end = (began - zero) / 1e6, (ended - zero) / 1e6
        box = replace(box, start=start, end=end, execution=execution)
        boxes.append((which, box))
        first, last = spans[record.rank].get(which, (start, end))
        spans[record.rank][which] = (min(first, start), max(last, end))
        if message is not None:
            key = (record.step, record.context, execution, message.chan, message.seq or 0)
            (tails if isinstance(message, Send) else heads)[key] = which, box
    lanes = {
        which: lane for rank_spans in spans.values() for which, lane in _lanes(rank_spans).items()
    }

    def track(which: Which, box: TimeSlice) -> TrackKey:
        return TrackKey(records.programs[which[0]].rank, box.stream, lanes[which])

    slices: dict[TrackKey, list[TimeSlice]] = defaultdict(list)
    for which, box in boxes:
        slices[track(which, box)].append(box)
    arrows = (
        ((track(*tail), tail[1].start), (track(*heads[key]), heads[key][1].end - NUDGE))
        for key, tail in tails.items()
        if key in heads
    )
    return lay_out(title, note, {record.rank for record in records.programs}, slices, arrows)


_MessageKey: TypeAlias = tuple[int, int, int, int, int]
"""Step, context, execution, channel and number."""


def _events(records: Records) -> Iterator[tuple[int, int, int, float, float]]:
    """Record, instruction and execution, begin and end in nanoseconds of rank 0."""
    for index, record in enumerate(records.programs):
        first, last = records.first[record.rank], records.last[record.rank]
        events = record.events
        for at in range(0, len(events), 4):
            instruction, execution, *times = events[at : at + 4]
            began, ended = (common_time(time, first, last) for time in times)
            yield index, instruction, execution, began, ended


def _instructions(
    record: ProgramRecord, module: Module
) -> list[tuple[TimeSlice, Send | Recv | None]]:
    """For each instruction its box, and the message that it sends or waits for."""
    boxes = OpBoxes(module, module.program_of(record.rank))
    origins = [(origin.op, origin.role, origin.awaited) for origin in record.origins]
    return [(boxes.instruction(*origin), boxes.of_message(*origin)) for origin in origins]


def _lanes(spans: Mapping[Which, tuple[float, float]]) -> dict[Which, int]:
    """For each execution the first `lane` in which it overlaps with no other."""
    free_at: list[float] = []
    lanes: dict[Which, int] = {}
    for which, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        lane = next((i for i, time in enumerate(free_at) if time <= start), len(free_at))
        if lane == len(free_at):
            free_at.append(end)
        else:
            free_at[lane] = end
        lanes[which] = lane
    return lanes
