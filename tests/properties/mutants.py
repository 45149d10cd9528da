"""Mutants of scheduled programs, and what happens when the virtual world runs one for real.

An execution goes wrong if a rank waits for ever, or if anything reads storage that was freed. To
see the latter, what is freed is filled with infinities and a slot that is emptied with NaN; every
function and message refuses both; and the program is run once for each of its messages, that
message being as slow as can be: if it can still be on its way when its storage is freed, then it is
in that run. Outputs and what an opaque function has been given must not change later: those in a
slot do. Other storage that was given away lives on, as it does in Python.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from cg.backends.dtypes import TORCH_DTYPES
from cg.backends.errors import DeadlockError, RemoteError
from cg.backends.program.value_copies import duplicate
from cg.backends.virtual.world import VirtualExecutable
from cg.ir.attributes import Stream, Symbol
from cg.ir.ops import Call, Collective, Constant, Free, Op, Recv, Send, Value, View, Wait
from cg.ir.ops.clone import clone
from cg.ir.ops.module import Channel, Function, FunctionKind, Module, Program
from cg.ir.types import TensorType, UnitType
from cg.passes.analysis.liveness import Storages

Number = Callable[[int], int]
"""Draws an integer from 0 to below its argument."""


def mutate(module: Module, number: Number) -> str:
    """Change a scheduled module in one place; what was done."""
    mutation = _MUTATIONS[number(len(_MUTATIONS))]
    program = module.programs[number(len(module.programs))]
    mutation(module, program, number)
    renumber(module)
    return mutation.__name__.strip("_")


def swap(module: Module, program: Program, number: Number) -> None:
    """Exchange two instructions that stand near each other."""
    ops = program.ops
    if len(ops) > 2:
        one = number(len(ops) - 2)
        other = min(one + 1 + number(3), len(ops) - 2)
        ops[one], ops[other] = ops[other], ops[one]


def move(module: Module, program: Program, number: Number) -> None:
    """Put a communication, a wait or a free to another place that its values allow."""
    ops = program.ops
    found = [
        i for i, op in enumerate(ops) if isinstance(op, Send | Recv | Collective | Wait | Free)
    ]
    if not found:
        return
    op = ops.pop(found[number(len(found))])
    made = [i for i, other in enumerate(ops) if not set(op.operands).isdisjoint(other.results)]
    low = max(made, default=-1) + 1
    used = [i for i, other in enumerate(ops) if not set(op.results).isdisjoint(other.operands)]
    high = min(used, default=len(ops) - 1)
    if isinstance(op, Free):
        uses = [i for i, other in enumerate(ops) if op.operands[0] in other.operands]
        low = max(uses, default=-1) + 1
    ops.insert(low + number(max(high - low, 0) + 1), op)


def _drop_wait(module: Module, program: Program, number: Number) -> None:
    """Leave out a wait for a send, also where a free counts on it."""
    waits = [op for op in program.ops if isinstance(op, Wait) and _is_unit(op)]
    if waits:
        dropped = waits[number(len(waits))]
        program.ops.remove(dropped)
        _forget(program, set(dropped.results))


def _drop_condition(module: Module, program: Program, number: Number) -> None:
    """Let a free no longer say what had to happen before."""
    frees = [op for op in program.ops if isinstance(op, Free) and len(op.operands) > 1]
    if frees:
        free = frees[number(len(frees))]
        free.operands = free.operands[:1]


def _split_channel(module: Module, program: Program, number: Number) -> None:
    """Let every second message between two ranks take a channel of its own."""
    edges = [c for c in module.channels.values() if not c.collective]
    if edges:
        channel = edges[number(len(edges))]
        new = max(module.channels) + 1
        module.channels[new] = replace(channel, id=new)
        for op in _all(module):
            if isinstance(op, Send | Recv) and op.chan == channel.id and op.seq % 2:
                op.chan = new


def _merge_channels(module: Module, program: Program, number: Number) -> None:
    """Let two channels between the same ranks be one."""
    by_ranks: dict[tuple[int, ...], list[Channel]] = defaultdict(list)
    for channel in module.channels.values():
        if not channel.collective:
            by_ranks[channel.ranks].append(channel)
    several = [channels for channels in by_ranks.values() if len(channels) > 1]
    if several:
        kept, gone = several[number(len(several))][:2]
        slots = None if kept.slots is None else max(kept.slots, gone.slots or 0)
        size = max(kept.slot_bytes or 0, gone.slot_bytes or 0)
        module.channels[kept.id] = replace(
            kept, slots=slots, slot_bytes=None if slots is None else size
        )
        del module.channels[gone.id]
        for op in _all(module):
            if isinstance(op, Send | Recv) and op.chan == gone.id:
                op.chan = kept.id


def _merge_streams(module: Module, program: Program, number: Number) -> None:
    """Let a rank do all its sends and receives on one stream."""
    for op in program.ops:
        if isinstance(op, Recv) and op.stream is Stream.RECV and not op.operands:
            op.stream = Stream.SEND


def _retarget_slot(module: Module, program: Program, number: Number) -> None:
    """Let a message come in another slot of its channel."""
    recvs = [op for op in program.ops if isinstance(op, Recv) and op.slot is not None]
    if recvs:
        recv = recvs[number(len(recvs))]
        recv.slot = number(module.channels[recv.chan].slots or 1)


def _retarget_operand(module: Module, program: Program, number: Number) -> None:
    """Let an op take another value of the same type."""
    ops = [op for op in program.ops if isinstance(op, Call | Send) and op.operands]
    if not ops:
        return
    op = ops[number(len(ops))]
    at = number(len(op.operands))
    # Not inputs and views of them, whose storage is not the program's.
    values = [v for other in program.ops if not isinstance(other, View) for v in other.results]
    like = [v for v in values if v.type == op.operands[at].type]
    if like:
        chosen = like[number(len(like))]
        op.operands = (*op.operands[:at], chosen, *op.operands[at + 1 :])


_MUTATIONS: Sequence[Callable[[Module, Program, Number], None]] = (
    swap,
    swap,
    move,
    move,
    _drop_wait,
    _drop_condition,
    _split_channel,
    _merge_channels,
    _merge_streams,
    _retarget_slot,
    _retarget_operand,
)


def _is_unit(op: Op) -> bool:
    return bool(op.results) and isinstance(op.result.type, UnitType)


def _forget(program: Program, values: set[Value]) -> None:
    for op in program.ops:
        op.operands = tuple(value for value in op.operands if value not in values)


def _all(module: Module) -> list[Op]:
    return [op for program in module.programs for op in program.ops]


def renumber(module: Module) -> None:
    """Number messages in program order, and let each send use the slot of its receive."""
    slots: dict[tuple[int, int], int | None] = {}
    for kind in (Recv, Send, Collective):
        for program in module.programs:
            count: dict[int, int] = defaultdict(int)
            for op in program.ops:
                if not isinstance(op, kind):
                    continue
                chan = op.chan or 0
                op.seq = count[chan]
                count[chan] += 1
                if isinstance(op, Recv):
                    slots[chan, op.seq] = op.slot
                elif isinstance(op, Send):
                    op.slot = slots.get((chan, op.seq))


class Poisoned(Exception):
    """Somebody has read storage that was freed."""


@dataclass
class Bench:
    """Runs mutants of a module's programs.

    Attributes:
        kept: what opaque functions have been given.
    """

    kept: list[torch.Tensor] = field(default_factory=list)

    def goes_wrong(self, module: Module) -> bool:
        """True if there is an execution that waits for ever, or reads freed memory."""
        self.kept = []
        armed = self._arm(clone(module))
        bodies = {f.name: self._body(f) for f in armed.functions.values()}
        executable = VirtualExecutable(armed, bodies, {}, poison=True)
        inputs = [[_tensor(v, i) for i, v in enumerate(p.params)] for p in armed.programs]
        messages = {(op.chan, op.seq) for op in _all(armed) if isinstance(op, Send | Collective)}
        try:
            with mock.patch("cg.backends.virtual.rendezvous.duplicate", _refusing_duplicate):
                for hold in (None, *sorted(messages)):
                    given = [[value.clone() for value in values] for values in inputs]
                    for values in executable.run(given, hold=hold):
                        _refuse(values)
                    if any(bool(value.isnan().any()) for value in self.kept):
                        raise Poisoned
        except (DeadlockError, RemoteError, Poisoned):
            return True
        return False

    def _arm(self, module: Module) -> Module:
        """Let each `free` destroy what it frees, and constants be made anew in each execution."""
        for program in module.programs:
            storages = Storages(program, module.functions)
            given = {storages.of(value) for value in program.params}
            ops: list[Op] = []
            for op in program.ops:
                if isinstance(op, Constant):
                    name = _declare(module, "fill", (), (_bare(op.result),))
                    op = Call((), op.results, fn=Symbol(name), stream=op.stream)
                elif isinstance(op, Free) and storages.of(op.operands[0]) not in given:
                    value = op.operands[0]
                    name = _declare(module, "destroy", (_bare(value),), (UnitType(),))
                    done = Value(f"{value.name}.gone.{len(ops)}", UnitType())
                    ops.append(Call((value,), (done,), fn=Symbol(name), stream=Stream.COMPUTE))
                ops.append(op)
            program.ops[:] = ops
        return module

    def _body(self, function: Function) -> Callable[..., Sequence[Any]]:
        aliases = dict(function.aliases)
        if function.name.startswith("destroy"):
            return _destroy

        def run(*inputs: Any) -> Sequence[Any]:
            _refuse(inputs)
            if function.kind is FunctionKind.OPAQUE:
                self.kept += [value for value in inputs if isinstance(value, torch.Tensor)]
            return [
                inputs[aliases[index]] if index in aliases else _make(type_)
                for index, type_ in enumerate(function.outputs)
            ]

        return run


def _declare(module: Module, what: str, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> str:
    name = f"{what}.{','.join(map(str, (*inputs, *outputs)))}"
    module.functions.setdefault(name, Function(name, inputs, outputs))
    return name


def _bare(value: Value) -> TensorType:
    assert isinstance(value.type, TensorType)
    return value.type


def _make(type_: Any) -> torch.Tensor | None:
    if not isinstance(type_, TensorType):
        return None
    return torch.ones(type_.shape, dtype=TORCH_DTYPES[type_.dtype])


def _tensor(value: Value, number: int) -> torch.Tensor:
    made = _make(value.type)
    assert made is not None
    return made + number


def _destroy(value: torch.Tensor) -> Sequence[Any]:
    value.fill_(float("inf"))
    return (None,)


def _refuse(values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor) and not bool(value.isfinite().all()):
            raise Poisoned


def _refusing_duplicate(value: Any, type_: Any) -> Any:
    _refuse([value])
    return duplicate(value, type_)
