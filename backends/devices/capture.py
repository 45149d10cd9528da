"""Parts of a rank's program that are recorded once as a graph of the device and then replayed.

A graph reads and writes the memory that it was captured with. So what a segment takes from outside
is copied into memory of its own first, unless it has come at the same address twice in a row; what
it hands to methods is copied behind it. What it returns to the caller is not: the caller gets the
graph's own memory, and while it is in use another graph of the same segment is replayed. Gradients
stay in a graph's memory as `.grad` of their parameters, since that is what an optimizer reads.
Which tensors the parameters and gradients are is looked at before each replay; a segment has graphs
for each combination that it has met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions
from torch.utils import dlpack

from ...ir.module import FunctionKind, Program
from ...ir.ops import Call
from ..base import Body
from ..binder import Code
from ..instructions import Instruction, Registers
from ..linked import LinkedProgram
from ..steps import KEEP, Role, Step
from .base import Device, Graph
from .binder import DeviceBinder
from .flow import Flow, Mark

WARM_UPS = 2
"""Executions that run as they are, before any is captured: libraries make their handles then."""

STATES = 4
"""Combinations of parameters and gradients that a segment has graphs for; with more, it runs as it
is."""

LENDING = 2
"""Graphs whose outputs the caller may hold; with all of them held, outputs are copied."""


class Loan:
    """A tensor of a graph that the caller gets, and whether it has been given back.

    What the caller gets has a storage of its own over the same memory. That storage goes with the
    last tensor that uses any of it, views included, whatever else uses the graph's.
    """

    __slots__ = ("_bytes", "_dtype", "_lent", "_shape")

    def __init__(self, tensor: Tensor) -> None:
        self._bytes = tensor.contiguous().reshape(-1).view(torch.uint8)
        self._dtype = tensor.dtype
        self._shape = tensor.shape
        self._lent: Any = None

    def out(self) -> Tensor:
        """The tensor, for the caller."""
        alias: Tensor = dlpack.from_dlpack(_export(self._bytes))
        tensor = alias.view(self._dtype).view(self._shape)
        self._lent = _reference(tensor.untyped_storage())
        return tensor

    def is_back(self) -> bool:
        """Whether nobody holds the tensor, or part of it, any more."""
        return self._lent is None or self._lent.expired()


_export: Any = torch._C._to_dlpack
_reference: Any = reductions.StorageWeakRef


def may_be_lent(tensor: Tensor) -> bool:
    """Whether a tensor's memory can be given another storage."""
    return tensor.is_contiguous() and tensor.numel() > 0 and not tensor.is_complex()


@dataclass(frozen=True, slots=True)
class Captured:
    """One graph, and the memory that it works on.

    Attributes:
        takes: for each register that it reads from outside, the memory that it reads.
        gives: for each register that others read behind it, what it leaves there.
        loans: the same for registers that the caller gets, if those are lent.
        state: the tensors that were parameters and gradients when it was captured; they live on.
        gradients: what `.grad` of each trained parameter is behind it.
    """

    graph: Graph
    takes: tuple[tuple[int, Tensor], ...]
    gives: tuple[tuple[int, Tensor], ...]
    loans: tuple[tuple[int, Loan], ...]
    state: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]

    def is_free(self) -> bool:
        """Whether the caller holds nothing of what it has last made."""
        return all(loan.is_back() for _, loan in self.loans)


@dataclass(slots=True)
class Graphs:
    """The graphs of a segment for one combination of tensors."""

    lending: list[Captured] = field(default_factory=list)
    copying: Captured | None = None


@dataclass(frozen=True, slots=True)
class Interface:
    """What a segment and the rest of the program have in common.

    Attributes:
        reads: registers that it reads and has not written.
        inputs: those of `reads` that hold inputs of the program.
        gives: registers that it writes and others read.
        copied: those of `gives` that leave the program's control, to methods or the caller.
        lent: those of `copied` that the caller alone gets.
    """

    reads: tuple[int, ...]
    inputs: tuple[int, ...]
    gives: tuple[int, ...]
    copied: frozenset[int]
    lent: frozenset[int]


class Segment:
    """Some instructions in a row, as one; none of them makes the host wait.

    Attributes:
        number: the `graph` of its ops.
        reason: why it runs as it is and is not replayed, if that is so.
        captures: graphs captured so far.
        replays: executions that replayed one.
    """

    def __init__(
        self,
        number: int,
        instructions: Sequence[Instruction],
        registers: Registers,
        interface: Interface,
        bodies: Sequence[Body],
        flow: Flow,
        stable: dict[int, Tensor],
        needs: Sequence[Mark],
    ) -> None:
        self.number = number
        self.reason = _refusal(bodies)
        self.captures = 0
        self.replays = 0
        self._instructions = tuple(instructions)
        self._registers = registers
        self._interface = interface
        self._state_of = [body.state for body in bodies if hasattr(body, "state")]
        self._trained_in = [body.trained for body in bodies if hasattr(body, "trained")]
        self._flow = flow
        self._device: Device = flow.device
        self._stable = stable
        self._needs = tuple(needs)
        self._graphs: dict[tuple[Any, ...], Graphs] = {}
        self._addresses: tuple[int, ...] = ()
        self._direct: tuple[int, ...] = ()
        self._warm = 0

    def __call__(self) -> bool:
        """Put the segment's work on the streams."""
        if self.reason is not None or self._warm < WARM_UPS:
            self._warm += 1
            self._run()
            return True
        trained = [p for tensors in self._trained_in for p in tensors()]
        state = [t for tensors in self._state_of for t in tensors()]
        gradients = [p.grad for p in trained]
        direct = self._come_again()
        key = (direct, *map(_address, state), *map(id, gradients))
        graphs = self._graphs.get(key)
        if graphs is None:
            if len(self._graphs) >= STATES:
                self.reason = "its parameters or gradients are other tensors each time"
                self._run()
                return True
            graphs = self._graphs[key] = Graphs()
        found = self._free_one(graphs)
        if found is None:
            found = self._capture(trained, (*state, *gradients), gradients, graphs, direct)
        if found is None:
            self._run()
        else:
            self._replay(found, trained)
        return True

    def forget(self) -> None:
        """Drop the graphs: their messages are no more."""
        self._graphs.clear()
        self._warm = 0

    def _run(self) -> None:
        self._flow.fork()
        for instruction in self._instructions:
            instruction()

    def _come_again(self) -> bool:
        """Whether all inputs are where a graph may read them in place.

        That is where they were when they first came at the same addresses twice in a row: a program
        whose caller has one set of buffers then copies nothing.
        """
        registers = self._registers
        addresses = tuple([registers[i].data_ptr() for i in self._interface.inputs])
        if not self._direct and addresses == self._addresses:
            self._direct = addresses
        self._addresses = addresses
        return bool(addresses) and addresses == self._direct

    def _free_one(self, graphs: Graphs) -> Captured | None:
        for captured in graphs.lending:
            if captured.is_free():
                return captured
        return graphs.copying

    def _replay(self, captured: Captured, trained: Sequence[Tensor]) -> None:
        registers = self._registers
        for register, memory in captured.takes:
            value = registers[register]
            if value is not memory:
                memory.copy_(value, non_blocking=True)
        for mark in self._needs:
            mark.wait(self._flow.compute)
        captured.graph.replay()
        self.replays += 1
        copied = self._interface.copied
        for register, value in captured.gives:
            registers[register] = value.clone() if register in copied else value
        for register, loan in captured.loans:
            registers[register] = loan.out()
        for parameter, gradient in zip(trained, captured.gradients, strict=True):
            parameter.grad = gradient

    def _capture(
        self,
        trained: Sequence[Tensor],
        state: tuple[Tensor | None, ...],
        gradients: Sequence[Tensor | None],
        graphs: Graphs,
        direct: bool,
    ) -> Captured | None:
        """Record the segment; None, with a reason, if that cannot be."""
        registers, before = self._registers, list(self._registers)
        takes = self._take(direct)
        if takes is None:
            return None
        try:
            graph = self._device.capture(self._record)
        except RuntimeError as error:
            self.reason = f"it cannot be captured: {error}"
            registers[:] = before
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.grad = gradient
            return None
        self.captures += 1
        lends = len(graphs.lending) < LENDING
        gives, loans = self._given(lends)
        after = tuple(parameter.grad for parameter in trained)
        # What was read is put back: the replay takes it like any other.
        for register in self._interface.reads:
            registers[register] = before[register]
        captured = Captured(graph, takes, gives, loans, state, after)
        if lends:
            graphs.lending.append(captured)
        else:
            graphs.copying = captured
        return captured

    def _take(self, direct: bool) -> tuple[tuple[int, Tensor], ...] | None:
        """Put the memory that the graph is to read into the registers that it reads."""
        registers = self._registers
        takes = []
        for register in self._interface.reads:
            value = registers[register]
            if not isinstance(value, Tensor):
                self.reason = f"it reads {type(value).__name__}, which is no tensor"
                return None
            if direct and register in self._interface.inputs:
                continue
            memory = value if self._stable.get(register) is value else value.clone()
            registers[register] = memory
            takes.append((register, memory))
        return tuple(takes)

    def _given(
        self, lends: bool
    ) -> tuple[tuple[tuple[int, Tensor], ...], tuple[tuple[int, Loan], ...]]:
        """What the graph has left in registers, and what of it is lent to the caller."""
        registers, interface = self._registers, self._interface
        gives, loans = [], []
        for register in interface.gives:
            value = registers[register]
            registers[register] = None
            if not isinstance(value, Tensor):
                continue
            if lends and register in interface.lent and may_be_lent(value):
                loans.append((register, Loan(value)))
                continue
            gives.append((register, value))
            if register not in interface.copied:
                self._stable[register] = value
        return tuple(gives), tuple(loans)

    def _record(self) -> None:
        flow = self._flow
        flow.begin_capture()
        try:
            flow.fork()
            for instruction in self._instructions:
                instruction()
            flow.join()
        finally:
            flow.end_capture()


def cut(code: Code, linked: LinkedProgram, binder: DeviceBinder) -> tuple[Segment, ...]:
    """Make each run of instructions whose ops are of one graph a segment.

    The instructions of `code` are replaced: a segment counts as one. In front of what is not part
    of any, the other streams fork from the compute stream.
    """
    program, functions = linked.program, linked.module.functions
    runs = _runs(code, program)
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
        interface = _interface(code, program, first, last)
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
            binder.flow,
            stable,
            binder.awaited_outside(number),
        )
        segments.append(segment)
        step = Step(Role.COMPUTE, interface.reads, interface.gives)
        emit(segment, code.ops[first], None, step)
    code.instructions[:], code.ops[:] = instructions, ops
    code.awaited[:], code.steps[:] = awaited, steps
    code.clears.clear()
    return tuple(segments)


def _runs(code: Code, program: Program) -> list[tuple[int | None, int, int]]:
    """The instructions by graph: number, first, and one behind the last."""
    runs: list[tuple[int | None, int, int]] = []
    for index, at in enumerate(code.ops):
        number = program.ops[at].graph
        if runs and runs[-1][0] == number:
            runs[-1] = (number, runs[-1][1], index + 1)
        else:
            runs.append((number, index, index + 1))
    return runs


def _interface(code: Code, program: Program, first: int, last: int) -> Interface:
    written: dict[int, None] = {}
    reads: dict[int, None] = {}
    for step in code.steps[first:last]:
        for register in step.sources:
            if register not in written and code.template[register] is None:
                reads[register] = None
        written.update(dict.fromkeys(step.targets))
    hands_out: frozenset[int] = frozenset()
    wanted = set(code.outputs)
    for step in code.steps[last:]:
        wanted.update(step.sources)
        if step.function is not None and step.function.kind is FunctionKind.OPAQUE:
            hands_out |= frozenset(step.sources)
    inputs = tuple(register for register in reads if register < len(program.params))
    gives = tuple(register for register in written if register in wanted)
    # What both a later op and the caller take has one copy for both.
    lent = frozenset(code.outputs) - {r for step in code.steps[last:] for r in step.sources}
    return Interface(tuple(reads), inputs, gives, hands_out | set(code.outputs), lent)


def _instruction(do: Any) -> Instruction:
    def run() -> bool:
        do()
        return True

    return run


def _refusal(bodies: Sequence[Body]) -> str | None:
    if any(getattr(body, "rebinds", False) for body in bodies):
        return "it replaces buffers of an actor by new tensors"
    return None


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr()
