"""Record what a driven program computes between messages as graphs.

Hosts announce messages one by one, and executions wait for each other at locks, so neither is part
of a graph. Where such instructions stand among those of a graph, waits for earlier executions are
moved ahead of it, and all other bookkeeping behind it. After a failure an execution goes on without
graphs, instruction by instruction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...program.code import Code
from ...program.instruction_info import Role
from ...program.instructions import Instruction
from ..stream_order import StreamOrder
from .capture import CapturedSegment
from .driven import DrivenBinder
from .segments import SegmentMaker, runs_of


@dataclass(frozen=True)
class Interleaved:
    """A program's instructions with graphs among them.

    Attributes:
        instructions: to be called in order.
        places: the index of each instruction in the plain program; of a graph, that of its first.
        within: for each graph, by its index, the instructions of the plain program that it runs.
        behind: for each graph, by its index, those that stand among them and come behind it.
        plain: the instructions of the plain program.
        segments: the graphs.
    """

    instructions: list[Instruction]
    places: list[int]
    within: dict[int, list[int]]
    behind: dict[int, list[int]]
    plain: Sequence[Instruction]
    segments: list[CapturedSegment]

    def place(self, index: int) -> int:
        """The index in the plain program of what instruction `index` is running."""
        instruction = self.instructions[index]
        if isinstance(instruction, CapturedSegment):
            return self.within[index][instruction.at]
        return self.places[index]

    def put_off(self, index: int) -> Iterator[Instruction]:
        """The instructions that the plain program would have run by now, and that have not run."""
        place = self.place(index)
        return (self.plain[i] for i in self.behind.get(index, ()) if i < place)


def interleave(code: Code, binder: DrivenBinder) -> Interleaved:
    """Replace each run of computation that is worth it by a graph; `code` does not change."""
    interleaved = Interleaved([], [], {}, {}, code.instructions, [])
    make, order = SegmentMaker(code, binder), StreamOrder(binder.device)

    def emit(indices: Sequence[int]) -> None:
        interleaved.instructions.extend(code.instructions[i] for i in indices)
        interleaved.places.extend(indices)

    for number, first, last in runs_of(code, binder.linked.program):
        if number is None or not make.is_worth_it(number, first, last):
            emit(range(first, last))
            continue
        within = [i for i in range(first, last) if code.infos[i].role is Role.COMPUTE]
        acquires = [
            i for i in range(within[0], within[-1]) if code.instructions[i] in binder.acquires
        ]
        behind = sorted({*range(within[0], within[-1])} - {*within, *acquires})
        emit([*range(first, within[0]), *acquires])
        interleaved.within[len(interleaved.places)] = within
        interleaved.behind[len(interleaved.places)] = behind
        segment = make(number, first, last, within, order)
        interleaved.instructions.append(segment)
        interleaved.segments.append(segment)
        interleaved.places.append(within[0])
        emit([*behind, *range(within[-1] + 1, last)])
    return interleaved
