"""Make the boxes of a scheduled program's ops in a timeline."""

from __future__ import annotations

from dataclasses import replace

from ...backends.program.instruction_info import Role
from ...ir.attributes import Effect, Stream
from ...ir.ops import Asynchronous, Call, Collective, CopyStart, Op, Recv, Send, Value, Wait
from ...ir.ops.module import Module, Program
from ...ir.text.printer import format_op
from ...ir.types import TensorType, promised
from .model import KIND_OF, TimeSlice, WorkKind


class OpBoxes:
    """The boxes of a program's ops without their times, each made once."""

    def __init__(self, module: Module, program: Program) -> None:
        self._module = module
        stages = sorted({op.task.stage for op in program.ops if op.task is not None})
        self._chunks = {stage: chunk for chunk, stage in enumerate(stages)}
        self._boxes: dict[int, TimeSlice] = {}
        self._ops = program.ops
        self._makers: dict[Value, Op] = {value: op for op in program.ops for value in op.results}

    def of(self, op: Op) -> TimeSlice:
        """The box of `op`."""
        box = self._boxes.get(id(op))
        if box is None:
            box = self._boxes[id(op)] = self._make(op)
        return box

    def instruction(self, index: int, role: Role, awaited: int | None) -> TimeSlice:
        """The box of an instruction that was made for the op at `index`.

        Args:
            index: of the op in the program.
            role: what the instruction does.
            awaited: index of the communication op that it waits for, if it does.
        """
        op = self._ops[index]
        box = self.of(op)
        communicates = isinstance(op, Asynchronous)
        if role is Role.AWAIT:
            awaited_name = (
                "the others' reports" if awaited is None else self._name(self._ops[awaited])
            )
            return replace(box, kind=WorkKind.WAIT, name=f"wait: {awaited_name}", label="")
        if role is Role.ISSUE and not communicates:
            return replace(box, kind=WorkKind.MESSAGE, name="report", label="", op="", source="")
        if role is Role.KEEP and isinstance(op, Call):
            actor = self._module.functions[op.fn.name].actor
            name = f"turn of {self._module.name} at {actor}"
            return replace(box, kind=WorkKind.WAIT, name=name, label="", nbytes=None)
        if role is Role.KEEP:
            return replace(box, kind=WorkKind.OTHER, label="", nbytes=None)
        return box

    def of_message(self, index: int, role: Role, awaited: int | None) -> Send | Recv | None:
        """The message that an instruction sends, or whose arrival it waits for."""
        op = self._ops[index if awaited is None else awaited]
        if role is Role.ISSUE and isinstance(op, Send):
            return op
        return op if role is Role.AWAIT and isinstance(op, Recv) else None

    def _make(self, op: Op) -> TimeSlice:
        mb = op.mb if op.task is None else op.task.microbatch
        location = op.loc
        if location is None and isinstance(op, Call):
            location = self._module.functions[op.fn.name].loc
        return TimeSlice(
            0.0,
            0.0,
            self._kind(op),
            self._name(op),
            self._label(op),
            format_op(op),
            "" if location is None else str(location),
            _nbytes(op),
            mb,
            chunk=0 if op.task is None else self._chunks[op.task.stage],
            stream=str((op.stream or Stream.COMPUTE).value),
        )

    def _kind(self, op: Op) -> WorkKind:
        if isinstance(op, Wait):
            return WorkKind.WAIT
        if isinstance(op, Asynchronous):
            return WorkKind.MESSAGE
        if not isinstance(op, Call):
            return WorkKind.OTHER
        function = self._module.functions[op.fn.name]
        if op.task is not None:
            return WorkKind.OTHER if function.actor is None else KIND_OF[op.task.action]
        if function.actor is None:
            return WorkKind.OTHER
        updates = bool(self._chunks) and function.effect in (Effect.WRITE, Effect.REDUCE)
        return WorkKind.UPDATE if updates else WorkKind.CALL

    def _name(self, op: Op) -> str:
        task = "" if op.task is None else f"{op.task} "
        if isinstance(op, Call):
            return task + op.fn.name
        if isinstance(op, Send):
            return f"{task}send to rank {op.peer}"
        if isinstance(op, Recv):
            return f"{task}recv from rank {op.peer}"
        if isinstance(op, CopyStart):
            return f"{task}copy {'to' if op.is_to_host else 'from'} the host"
        if isinstance(op, Wait):
            maker = self._makers.get(op.operands[0])
            if isinstance(maker, Asynchronous):
                return f"wait: {self._name(maker)}"
        return task + op.opcode

    def _label(self, op: Op) -> str:
        if isinstance(op, Call):
            function = self._module.functions[op.fn.name]
            if op.task is not None:
                return str(op.task.microbatch) if function.actor is not None else ""
            return op.fn.name.rpartition(".")[2]
        if isinstance(op, Send | Recv | Collective) and op.task is not None:
            return str(op.task.microbatch)
        return op.opcode if isinstance(op, Collective) else ""


def _nbytes(op: Op) -> int | None:
    """Bytes of tensors that an op carries or makes."""
    values = op.operands if isinstance(op, Send) else op.results
    types = [promised(value.type) for value in values]
    sizes = [type_.nbytes for type_ in types if isinstance(type_, TensorType)]
    return sum(sizes) if sizes else None
