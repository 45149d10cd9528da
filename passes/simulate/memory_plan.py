"""Estimate the memory that a rank's program holds, from the values that its ops make and free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...ir.attributes import Action
from ...ir.ops import Call, Constant, CopyStart, Free, Op, Recv, Reserve, Slice, Value
from ...ir.ops.module import Function, Module, Program
from ...ir.ops.storage import SharedStorage
from ...ir.types import device_bytes, tensor_bytes
from ..frontend.stored_values import Way, ways_of


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory that a rank's program holds, in bytes, without objects and the state of actors.

    Attributes:
        inputs: the bytes of the program's parameters.
        slots: the bytes of the slots of all channels to this rank.
        values: the most bytes that all other values hold at once.
        outputs: the bytes of the outputs; part of `values` if the program makes them.
        gathered: the most bytes that gathered parameters hold at once; part of `values`.
        working: the most bytes that these values hold at once together with what a call holds
            inside, beside its operands and results (`Function.workspace`).
        saved: the part of `working` that forwards hold for their backwards; 0 outside of pipelines.
        inside: the part of `working` that a call holds inside.
        largest: the value that holds the most bytes of `working`, and these bytes.
        at: the op at which that is, its task and the user's line; empty if no op makes any value.
        host: the bytes of the host's memory that belong to the program, beside a device.
        moved: the bytes that an execution copies there; it copies as many back.
    """

    inputs: int
    slots: int
    values: int
    outputs: int
    gathered: int = 0
    working: int = 0
    saved: int = 0
    inside: int = 0
    largest: tuple[str, int] = ("", 0)
    at: str = ""
    host: int = 0
    moved: int = 0

    @property
    def peak(self) -> int:
        """The most bytes that are held at once."""
        return self.inputs + self.slots + self.working


def memory_plan(module: Module, rank: int) -> MemoryPlan:
    """Estimate the memory of one rank of a scheduled module; it is best after `plan-buffers`.

    Storage counts from the op that makes it, or that starts to receive into it, to its last `free`,
    or to the end of the program. A result that is declared to alias an operand, such as a saved
    input, has no storage of its own. Constants of the step are not counted, as the state of actors
    is not.
    """
    program = module.program_of(rank)
    storage = SharedStorage(program, module.functions, collectives=True)
    last_frees = {storage.of(op.operands[0]): op for op in program.ops if isinstance(op, Free)}
    held: dict[Value, int] = {}
    ways = ways_of(program.ops, module.functions)
    parameters: dict[Value, int] = {}
    live = most = gathered = 0
    peak = _Peak()
    for op in program.ops:
        if isinstance(op, Free):
            group = storage.of(op.operands[0])
            if last_frees[group] is op:
                live -= held.pop(group, 0)
                parameters.pop(group, None)
            continue
        for value in brings(op, module.functions):
            size = device_bytes(value.type)
            group = storage.of(value)
            held[group] = held.get(group, 0) + size
            live += size
            if ways.get(value) is Way.GATHERED:
                parameters[group] = held[group]
                gathered = max(gathered, sum(parameters.values()))
        inside = module.functions[op.fn.name].workspace if isinstance(op, Call) else 0
        most = max(most, live)
        if live + inside > peak.size:
            peak = _Peak(op, live + inside, inside, dict(held))
    slots = sum(
        (channel.slots or 0) * (channel.slot_bytes or 0)
        for channel in module.channels.values()
        if not channel.collective and channel.ranks[1] == rank
    )
    inputs, outputs = (
        sum(tensor_bytes(value.type) for value in values)
        for values in (program.params, program.outputs)
    )
    saved = _saved(program, storage)
    copies = [op for op in program.ops if isinstance(op, CopyStart) and op.is_to_host]
    return MemoryPlan(
        inputs,
        slots,
        most,
        outputs,
        gathered,
        peak.size,
        sum(size for group, size in peak.held.items() if group in saved),
        peak.inside,
        peak.largest,
        peak.at,
        sum(host_buffers(copies)),
        sum(tensor_bytes(op.result.type) for op in copies),
    )


def host_buffers(copies: Iterable[CopyStart]) -> list[int]:
    """The bytes of each buffer of a rank's host that copies fill: one a slot, or one a copy."""
    shared: dict[int, int] = {}
    own: list[int] = []
    for op in copies:
        size = tensor_bytes(op.result.type)
        if op.slot is None:
            own.append(size)
        else:
            shared[op.slot] = max(shared.get(op.slot, 0), size)
    return [*shared.values(), *own]


@dataclass(frozen=True)
class _Peak:
    """The point at which a program holds the most.

    Attributes:
        op: the op; None before the first.
        size: the bytes that values hold, and its call inside.
        inside: the bytes that its call holds inside.
        held: the bytes of each storage at the op, by one of its values.
    """

    op: Op | None = None
    size: int = 0
    inside: int = 0
    held: dict[Value, int] = field(default_factory=dict)

    @property
    def largest(self) -> tuple[str, int]:
        """The storage with the most bytes, by the name of a value, and the bytes."""
        if not self.held:
            return "", 0
        value = max(self.held, key=self.held.__getitem__)
        return value.name, self.held[value]

    @property
    def at(self) -> str:
        """The op in words."""
        if self.op is None:
            return ""
        name = f"@{self.op.fn.name}" if isinstance(self.op, Call) else self.op.opcode
        task = "" if self.op.task is None else f" in {self.op.task}"
        loc = "" if self.op.loc is None else f" ({self.op.loc})"
        return f"{name}{task}{loc}"


def _saved(program: Program, storage: SharedStorage) -> set[Value]:
    """The storage that tasks F use or make, and tasks B or W use, too."""
    forward: set[Value] = set()
    backward: set[Value] = set()
    for op in program.ops:
        if op.task is not None and not isinstance(op, Free):
            used = forward if op.task.action is Action.FORWARD else backward
            used.update(storage.of(value) for value in (*op.operands, *op.results))
    return forward & backward


def brings(op: Op, functions: dict[str, Function]) -> list[Value]:
    """The results of an op with new storage: no views, results of waits, or values in slots."""
    if isinstance(op, Call):
        shared = {output for output, _ in functions[op.fn.name].aliases}
        return [value for number, value in enumerate(op.results) if number not in shared]
    is_slot = isinstance(op, Recv) and op.slot is not None
    is_given = isinstance(op, Constant) and op.ref is not None
    if isinstance(op, Slice) and op.copies:
        return [op.result]
    if isinstance(op, Reserve):
        return [op.results[0]]
    return [] if is_slot or is_given or op.shared_operand is not None else list(op.results)
