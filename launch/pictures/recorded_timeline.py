"""Make a picture of the instructions that ranks have recorded."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ...backends.timing.tracing import Origin
from ...ir.module import Module
from ...ir.ops import Send
from ..measure.clocks import Reading, common_time
from .model import NUDGE, Arrow, Picture, Row, Slice, Spot, Track
from .op_boxes import Look, Looks
from .program_timeline import stream_order

Which: TypeAlias = tuple[int, int]
"""An execution: index of its record, and its number."""


@dataclass(frozen=True, slots=True)
class ProgramRecord:
    """The recording of one bound program of one rank.

    Attributes:
        step: number of the compiled step, the same on all ranks.
        seat: which of the programs it is that the rank has for that step.
        rank: whose program it is.
        origins, events, left_out: as in `InstructionLog`.
    """

    step: int
    seat: int
    rank: int
    origins: tuple[Origin, ...]
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
    first: tuple[Reading, ...]
    last: tuple[Reading, ...]

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
        found = set[int]()
        for record in self.programs:
            if record.step == step:
                found.update(record.events[1::4])
        return sorted(found)


def picture_of_records(records: Records, title: str, note: str = "") -> Picture:
    """A row for each rank, a track for each stream, a slice for each instruction.

    Where executions overlap on a rank, each has tracks of its own.
    """
    return _Maker(records).make(title, note)


@dataclass(slots=True)
class _Rank:
    """The slices of a rank, by execution and stream, before they are laid out."""

    boxes: dict[tuple[Which, str], list[Slice]] = field(default_factory=lambda: defaultdict(list))
    spans: dict[Which, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a message."""

    rank: int
    which: Which
    stream: str
    time: float


_MessageKey: TypeAlias = tuple[int, int, int, int, int]
"""Step, seat, execution, channel and number."""


class _Maker:
    """One picture on its way."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._zero = min((time for _, _, time, _ in self._events()), default=0.0)
        self._ranks: dict[int, _Rank] = {}
        self._tails: dict[_MessageKey, _End] = {}
        self._heads: dict[_MessageKey, _End] = {}

    def make(self, title: str, note: str) -> Picture:
        for rank in sorted({record.rank for record in self._records.programs}):
            self._ranks[rank] = _Rank()
        looks = [self._looks(record) for record in self._records.programs]
        messages = [self._messages(record) for record in self._records.programs]
        for index, event, began, ended in self._events():
            instruction, execution = event
            look = looks[index][instruction]
            which = (index, execution)
            self._add(which, look, (began - self._zero) / 1e6, (ended - self._zero) / 1e6)
            message = messages[index][instruction]
            if message is not None:
                self._note(which, look, message, (began - self._zero, ended - self._zero))
        rows, places = self._lay_out()
        return Picture(title, tuple(rows), note, tuple(self._arrows(places)))

    def _events(self) -> Iterator[tuple[int, tuple[int, int], float, float]]:
        """Record, instruction and execution, begin and end in nanoseconds of rank 0."""
        for index, record in enumerate(self._records.programs):
            first, last = self._records.first[record.rank], self._records.last[record.rank]
            events = record.events
            for at in range(0, len(events), 4):
                instruction, execution, began, ended = events[at : at + 4]
                yield (
                    index,
                    (instruction, execution),
                    common_time(began, first, last),
                    common_time(ended, first, last),
                )

    def _looks(self, record: ProgramRecord) -> list[Look]:
        module = self._records.modules[record.step]
        looks = Looks(module, module.program_of(record.rank))
        return [looks.instruction(o.op, o.role, o.awaited) for o in record.origins]

    def _messages(self, record: ProgramRecord) -> list[tuple[bool, int, int] | None]:
        """For each instruction: True if it sends, the channel, the number."""
        module = self._records.modules[record.step]
        looks = Looks(module, module.program_of(record.rank))
        ops = [looks.of_message(o.op, o.role, o.awaited) for o in record.origins]
        return [None if op is None else (isinstance(op, Send), op.chan, op.seq) for op in ops]

    def _add(self, which: Which, look: Look, start: float, end: float) -> None:
        rank = self._ranks[self._records.programs[which[0]].rank]
        rank.boxes[which, look.stream].append(look.slice(start, end, which[1]))
        began, ended = rank.spans.get(which, (start, end))
        rank.spans[which] = (min(began, start), max(ended, end))

    def _note(
        self,
        which: Which,
        look: Look,
        message: tuple[bool, int, int],
        times: tuple[float, float],
    ) -> None:
        record = self._records.programs[which[0]]
        sends, channel, number = message
        time = times[0] / 1e6 if sends else times[1] / 1e6 - NUDGE
        end = _End(record.rank, which, look.stream, time)
        key = (record.step, record.seat, which[1], channel, number)
        (self._tails if sends else self._heads)[key] = end

    def _lay_out(self) -> tuple[list[Row], dict[tuple[Which, str], tuple[int, int]]]:
        """The rows, and where in them each stream of each execution is."""
        rows: list[Row] = []
        places: dict[tuple[Which, str], tuple[int, int]] = {}
        for number, rank in self._ranks.items():
            lanes = _lanes(rank.spans)
            tracks: dict[tuple[int, int, str], list[Slice]] = defaultdict(list)
            keys: dict[tuple[int, int, str], list[tuple[Which, str]]] = defaultdict(list)
            for (which, stream), slices in rank.boxes.items():
                key = (lanes[which], stream_order(stream), stream)
                tracks[key] += slices
                keys[key].append((which, stream))
            for at, key in enumerate(sorted(tracks)):
                places.update(dict.fromkeys(keys[key], (len(rows), at)))
            made = [
                Track(stream, tuple(sorted(tracks[lane, order, stream], key=_start)), lane)
                for lane, order, stream in sorted(tracks)
            ]
            rows.append(Row(number, tuple(made)))
        return rows, places

    def _arrows(self, places: Mapping[tuple[Which, str], tuple[int, int]]) -> Iterator[Arrow]:
        for key, tail in self._tails.items():
            head = self._heads.get(key)
            if head is not None:
                yield Arrow(
                    Spot(*places[tail.which, tail.stream], tail.time),
                    Spot(*places[head.which, head.stream], head.time),
                )


def _start(each: Slice) -> float:
    return each.start


def _lanes(spans: Mapping[Which, tuple[float, float]]) -> dict[Which, int]:
    """The first lane for each execution in which it overlaps with no other."""
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
