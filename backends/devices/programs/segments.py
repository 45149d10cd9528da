"""Which instructions of a program are one segment, and what it has in common with the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ....ir.module import FunctionKind, Program
from ....ir.ops import Call
from ...failures.fallbacks import Fallbacks
from ...program.code import Code
from ...program.instruction_info import KEEP, InstructionInfo, Role
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
    infos: list[InstructionInfo] = []
    for number, first, last in runs:
        if number is None:
            instructions += [_instruction(binder.flow.fork), *code.instructions[first:last]]
            infos += [replace(KEEP, op=code.infos[first].op), *code.infos[first:last]]
            continue
        interface = interface_of(code, program, first, last, binder.escaping)
        called = dict.fromkeys(
            op.fn.name
            for op in (program.ops[info.op] for info in code.infos[first:last])
            if isinstance(op, Call) and functions[op.fn.name].kind is FunctionKind.GRAPH
        )
        segment = Segment(
            number,
            code.instructions[first:last],
            code.registers,
            interface,
            [linked.bodies[name] for name in called],
            [
                info.port
                for info in code.infos[first:last]
                if info.port is not None and is_stream_port(info.port)
            ],
            binder.flow,
            stable,
            binder.awaited_outside(number),
            fallbacks,
            Mark(binder.flow) if several else None,
        )
        segments.append(segment)
        reads, gives, at = interface.reads, interface.gives, code.infos[first].op
        instructions.append(segment)
        infos.append(InstructionInfo(Role.COMPUTE, reads, gives, op=at))
    code.instructions[:], code.infos[:] = instructions, infos
    return tuple(segments)


def runs_of(code: Code, program: Program) -> list[tuple[int | None, int, int]]:
    """The instructions by graph: number, first, and one behind the last."""
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
    """What some instructions in a row have in common with the rest of a program.

    Args:
        escaping: registers whose values, or what shares their memory, methods or the caller get.
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
    # What both a later op and the caller take has one copy for both.
    return Interface(tuple(reads), inputs, gives, escaping | outputs, outputs - later)


def _instruction(do: Any) -> Instruction:
    def run() -> bool:
        do()
        return True

    return run
