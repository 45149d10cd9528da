"""Cut a bound program into segments, and find the registers that each shares with the rest."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ....ir.ops import Call
from ....ir.ops.module import FunctionKind, Program
from ...base import Body, GraphBody
from ...failures.fallbacks import Fallbacks
from ...program.code import Code
from ...program.instruction_info import KEEP, InstructionInfo, Role
from ...program.instructions import Instruction
from ..ports import StreamPort
from ..stream_order import StreamEvent, StreamOrder
from .binder import DeviceBinder
from .capture import CapturedSegment
from .captured import Interface

LEAST = 8
"""The fewest operators of torch that are worth a graph: fewer take the host less time than a replay
and the copies of its inputs."""


def cut(code: Code, binder: DeviceBinder) -> None:
    """Make each run of instructions whose ops are of one graph a segment of the binder.

    A segment replaces the instructions of its run in `code`. The other streams fork from the
    compute stream in front of instructions that are part of no segment.
    """
    runs = runs_of(code, binder.linked.program)
    several = sum(number is not None for number, _, _ in runs) > 1
    make = SegmentMaker(code, binder)
    segments: list[CapturedSegment] = []
    instructions: list[Instruction] = []
    infos: list[InstructionInfo] = []
    for number, first, last in runs:
        if number is None or (
            make.is_one_call(first, last) and not make.is_worth_it(number, first, last)
        ):
            instructions += [_fork(binder.order_of(number)), *code.instructions[first:last]]
            infos += [KEEP._replace(op=code.infos[first].op), *code.infos[first:last]]
            continue
        order = binder.order_of(number)
        behind = StreamEvent(order) if several else None
        segment = make(number, first, last, range(first, last), order, behind)
        segments.append(segment)
        instructions.append(segment)
        interface, at = segment.interface, code.infos[first].op
        infos.append(InstructionInfo(Role.COMPUTE, interface.reads, interface.gives, op=at))
    code.instructions[:], code.infos[:] = instructions, infos
    binder.segments = tuple(segments)


def set_aside(code: Code, binder: DeviceBinder) -> None:
    """Let another thread look after messages of hosts during what may wait for the device."""
    ops = binder.linked.program.ops
    by_stream = {ops[index].result for index, _ in binder.messages}
    for at, (instruction, info) in enumerate(zip(code.instructions, code.infos, strict=True)):
        op = ops[info.op]
        is_by_stream = not by_stream.isdisjoint((*op.operands, *op.results))
        puts = isinstance(instruction, CapturedSegment) or isinstance(op, Call) or is_by_stream
        if puts and instruction != binder.copies.move_on:
            code.instructions[at] = binder.copies.aside(instruction)


class SegmentMaker:
    """Makes the segments of one bound program."""

    def __init__(self, code: Code, binder: DeviceBinder) -> None:
        linked = binder.linked
        self.fallbacks = linked.fallbacks or Fallbacks(linked.module, linked.rank)
        self._code = code
        self._binder = binder
        self._stable: dict[int, Tensor] = {}

    def bodies(self, first: int, last: int) -> list[Body]:
        """The traced functions that a run of instructions calls."""
        linked = self._binder.linked
        ops = (linked.program.ops[info.op] for info in self._code.infos[first:last])
        called = dict.fromkeys(op.fn.name for op in ops if isinstance(op, Call))
        functions = linked.module.functions
        traced = [functions[name] for name in called if functions[name].kind is FunctionKind.GRAPH]
        return [linked.bodies[name] for name in dict.fromkeys(f.body_name for f in traced)]

    def is_one_call(self, first: int, last: int) -> bool:
        """Whether a run of instructions is one op, the call of a function that torch traced.

        How much another body does is not known.
        """
        ops = {info.op for info in self._code.infos[first:last] if info.role is not Role.KEEP}
        bodies = self.bodies(first, last)
        is_traced = all(isinstance(body, GraphBody) for body in bodies)
        return len(ops) == len(bodies) == 1 and is_traced

    def is_worth_it(self, number: int, first: int, last: int) -> bool:
        """Whether the functions that a run calls have enough operators; if not, that is noted."""
        operators = sum(map(_operators, self.bodies(first, last)))
        if operators < LEAST:
            worth = f"{operators} of the {LEAST} operators of torch that are worth it"
            self.fallbacks.note(number, worth)
        return operators >= LEAST

    def __call__(
        self,
        number: int,
        first: int,
        last: int,
        within: Sequence[int],
        order: StreamOrder,
        behind: StreamEvent | None = None,
    ) -> CapturedSegment:
        """The segment of a run, with those of its instructions that are in `within`.

        Args:
            order: the streams that the segment forks.
        """
        code, binder = self._code, self._binder
        ports = (code.infos[index].port for index in within)
        return CapturedSegment(
            number,
            [code.instructions[index] for index in within],
            code.registers,
            interface_of(code, binder.linked.program, first, last, binder.escaping),
            self.bodies(first, last),
            [port for port in ports if isinstance(port, StreamPort)],
            order,
            self._stable,
            binder.awaited_outside(number),
            self.fallbacks,
            behind,
        )


def _operators(body: Body) -> int:
    """The number of operators that a traced function calls."""
    nodes = body.graph_and_lines()[0].nodes if isinstance(body, GraphBody) else ()
    return sum(node.op == "call_function" for node in nodes)


def runs_of(code: Code, program: Program) -> list[tuple[int | None, int, int]]:
    """The runs of instructions of one graph: its number, first index, and index behind the last."""
    runs: list[tuple[int | None, int, int]] = []
    for index, info in enumerate(code.infos):
        number = program.ops[info.op].graph
        if runs and runs[-1][0] == number:
            runs[-1] = (number, runs[-1][1], index + 1)
        else:
            runs.append((number, index, index + 1))
    return runs


def interface_of(
    code: Code, program: Program, first: int, last: int, escaping: frozenset[int]
) -> Interface:
    """The registers that a run of instructions shares with the rest of a program.

    Args:
        escaping: registers of what methods or the caller get, and of values that share its memory.
    """
    written: dict[int, None] = {}
    reads: dict[int, None] = {}
    for info in code.infos[first:last]:
        for register in info.sources:
            if register not in written and code.template[register] is None:
                reads[register] = None
        written.update(dict.fromkeys(info.targets))
    later = {register for info in code.infos[last:] for register in info.sources}
    outputs = frozenset(code.outputs)
    inputs = tuple(register for register in reads if register < len(program.params))
    gives = tuple(register for register in written if register in later or register in outputs)
    # A value that both a later op and the caller take is copied once for both.
    return Interface(tuple(reads), inputs, gives, escaping | outputs, outputs - later)


def _fork(order: StreamOrder) -> Instruction:
    def run() -> bool:
        order.fork()
        return True

    return run
