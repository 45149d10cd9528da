"""Which instructions of a program are one segment, and what it has in common with the rest."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....ir.module import FunctionKind, Program
from ....ir.ops import Call
from ...failures.fallbacks import Fallbacks
from ...program.binder import Code
from ...program.instruction_info import KEEP, Role, Step
from ...program.instructions import Instruction
from ...program.linked import LinkedProgram
from ..ports import is_stream_port
from ..stream_order import Mark
from .binder import DeviceBinder
from .capture import Interface, Segment


def cut(code: Code, linked: LinkedProgram, binder: DeviceBinder) -> tuple[Segment, ...]:
    """Make each run of instructions whose ops are of one graph a segment.

    The instructions of `code` are replaced: a segment counts as one. In front of what is not part
    of any, the other streams fork from the compute stream.
    """
    program, functions = linked.program, linked.module.functions
    fallbacks = linked.fallbacks or Fallbacks(linked.module, linked.rank)
    runs = runs_of(code, program)
    several = sum(number is not None for number, _, _ in runs) > 1
    segments: list[Segment] = []
    stable: dict[int, Tensor] = {}
    instructions: list[Instruction] = []
    ops: list[int] = []
    awaited: list[int | None] = []
    steps: list[Step] = []

    def emit(instruction: Instruction, op: int, waits: int | None, step: Step) -> None:
        instructions.append(instruction)
        ops.append(op)
        awaited.append(waits)
        steps.append(step)

    for number, first, last in runs:
        if number is None:
            emit(_instruction(binder.flow.fork), code.ops[first], None, KEEP)
            for i in range(first, last):
                emit(code.instructions[i], code.ops[i], code.awaited[i], code.steps[i])
            continue
        interface = interface_of(code, program, first, last, binder.escaping)
        called = dict.fromkeys(
            op.fn.name
            for op in (program.ops[code.ops[i]] for i in range(first, last))
            if isinstance(op, Call) and functions[op.fn.name].kind is FunctionKind.GRAPH
        )
        segment = Segment(
            number,
            code.instructions[first:last],
            code.registers,
            interface,
            [linked.bodies[name] for name in called],
            [
                step.port
                for step in code.steps[first:last]
                if step.port is not None and is_stream_port(step.port)
            ],
            binder.flow,
            stable,
            binder.awaited_outside(number),
            fallbacks,
            Mark(binder.flow) if several else None,
        )
        segments.append(segment)
        step = Step(Role.COMPUTE, interface.reads, interface.gives)
        emit(segment, code.ops[first], None, step)
    code.instructions[:], code.ops[:] = instructions, ops
    code.awaited[:], code.steps[:] = awaited, steps
    code.clears.clear()
    return tuple(segments)


def runs_of(code: Code, program: Program) -> list[tuple[int | None, int, int]]:
    """The instructions by graph: number, first, and one behind the last."""
    runs: list[tuple[int | None, int, int]] = []
    for index, at in enumerate(code.ops):
        number = program.ops[at].graph
        if runs and runs[-1][0] == number:
            runs[-1] = (number, runs[-1][1], index + 1)
        else:
            runs.append((number, index, index + 1))
    return runs


def interface_of(
    code: Code, program: Program, first: int, last: int, escaping: frozenset[int]
) -> Interface:
    """What some instructions in a row have in common with the rest of a program.

    Args:
        escaping: registers whose values, or what shares their memory, methods or the caller get.
    """
    written: dict[int, None] = {}
    reads: dict[int, None] = {}
    for step in code.steps[first:last]:
        for register in step.sources:
            if register not in written and code.template[register] is None:
                reads[register] = None
        written.update(dict.fromkeys(step.targets))
    later = {register for step in code.steps[last:] for register in step.sources}
    outputs = frozenset(code.outputs)
    inputs = tuple(register for register in reads if register < len(program.params))
    gives = tuple(register for register in written if register in later or register in outputs)
    # What both a later op and the caller take has one copy for both.
    return Interface(tuple(reads), inputs, gives, escaping | outputs, outputs - later)


def _instruction(do: Any) -> Instruction:
    def run() -> bool:
        do()
        return True

    return run
