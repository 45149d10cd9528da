"""Parts of a driven program that are recorded as graphs: what it computes between messages.

Hosts announce messages one by one, and executions wait for each other at locks, so neither is
part of a graph. Of what stands among the instructions of a graph, waits for earlier executions go
ahead of it, and all other bookkeeping comes behind. After a failure an execution goes on without
graphs, instruction by instruction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ....ir.module import FunctionKind
from ....ir.ops import Call
from ...base import Body, GraphBody
from ...failures.fallbacks import Fallbacks
from ...program.code import Code
from ...program.instruction_info import Role
from ...program.instructions import Instruction
from ...program.linked import LinkedProgram
from ..stream_order import Flow
from .capture import Segment
from .driven import DrivenBinder
from .segments import interface_of, runs_of

LEAST = 8
"""Operators of torch that a graph replaces at least: fewer take the host less than its replay and
the copies of its inputs."""


@dataclass(frozen=True)
class Interleaved:
    """A program's instructions with graphs among them.

    Attributes:
        instructions: what to call, in order.
        places: for each the instruction of the plain program that it is; for a graph its first.
        within: for each graph, by its index, those instructions of the plain program that it does.
        behind: for each graph, by its index, those among them that come behind it.
        plain: the plain program.
        segments: the graphs.
    """

    instructions: list[Instruction]
    places: list[int]
    within: dict[int, list[int]]
    behind: dict[int, list[int]]
    plain: Sequence[Instruction]
    segments: list[Segment]

    def place(self, index: int) -> int:
        """Where the plain program is while instruction `index` runs."""
        instruction = self.instructions[index]
        if isinstance(instruction, Segment):
            return self.within[index][instruction.at]
        return self.places[index]

    def put_off(self, index: int) -> Iterator[Instruction]:
        """What the plain program would have done before the place, and has not been done."""
        place = self.place(index)
        return (self.plain[i] for i in self.behind.get(index, ()) if i < place)


def interleave(code: Code, linked: LinkedProgram, binder: DrivenBinder) -> Interleaved:
    """Replace each run of computation that is worth it by a graph; `code` stays as it is."""
    program, functions = linked.program, linked.module.functions
    made = Interleaved([], [], {}, {}, code.instructions, [])
    flow, stable = Flow(binder.device), dict[int, Tensor]()
    fallbacks = linked.fallbacks or Fallbacks(linked.module, linked.rank)

    def emit(indices: Sequence[int]) -> None:
        made.instructions.extend(code.instructions[i] for i in indices)
        made.places.extend(indices)

    for number, first, last in runs_of(code, program):
        within = [i for i in range(first, last) if code.infos[i].role is Role.COMPUTE]
        called = dict.fromkeys(
            op.fn.name
            for op in (program.ops[code.infos[i].op] for i in within)
            if isinstance(op, Call) and functions[op.fn.name].kind is FunctionKind.GRAPH
        )
        bodies = [linked.bodies[name] for name in called]
        if number is None:
            emit(range(first, last))
            continue
        operators = sum(map(_operators, bodies))
        if operators < LEAST:
            fallbacks.note(
                number, f"{operators} of the {LEAST} operators of torch that are worth it"
            )
            emit(range(first, last))
            continue
        gates = [i for i in range(within[0], within[-1]) if code.instructions[i] in binder.gates]
        behind = sorted({*range(within[0], within[-1])} - {*within, *gates})
        emit([*range(first, within[0]), *gates])
        made.within[len(made.places)] = within
        made.behind[len(made.places)] = behind
        segment = Segment(
            number,
            [code.instructions[i] for i in within],
            code.registers,
            interface_of(code, program, first, last, binder.escaping),
            bodies,
            (),
            flow,
            stable,
            (),
            fallbacks,
        )
        made.instructions.append(segment)
        made.segments.append(segment)
        made.places.append(within[0])
        emit([*behind, *range(within[-1] + 1, last)])
    return made


def _operators(body: Body) -> int:
    """How many operators a traced function calls."""
    nodes = body.graph.nodes if isinstance(body, GraphBody) else ()
    return sum(node.op == "call_function" for node in nodes)
