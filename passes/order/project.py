"""Project one global order onto ranks, to get a program for each."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.attributes import Task
from ...ir.layout import Region, volume, whole, within
from ...ir.ops import Assemble, Call, Collective, Op, Recv, Return, Send, Slice, Value, Wait
from ...ir.ops.clone import copy_op
from ...ir.ops.module import Module, Program
from ...ir.phases import Phase
from ...ir.types import FutureType, TensorType, Type, relocate
from .local_functions import LocalFunctions
from .work import ProgramWork


def project(module: Module, work: ProgramWork, order: Sequence[int]) -> None:
    """Give `module` a program for each rank, with the rank's ops in the global `order`.

    A send stands beside its receive in the global order, with its wait behind it. A lazy op, such
    as the wait for a receive, stands just before its first use on the rank. So the message of a
    blocked wait has been posted by both ranks, or is about to be. No rank waits for a message that
    comes later in the global order, and the programs cannot deadlock.

    A rank's types are those of the pieces that it holds. A slice of a whole piece, and an assemble
    of a single part, become that value itself.
    """
    projector = _Projector(module, work)
    for index in order:
        projector.add(work.program.ops[index])
    projector.finish()
    module.programs = [
        Program(work.program.name, params, ops, rank)
        for rank, (params, ops) in enumerate(zip(projector.params, projector.programs, strict=True))
    ]
    module.phase = Phase.SCHEDULED


class _Projector:
    """The programs of the ranks so far.

    `_values[rank]` maps the values of the program over all ranks to those of the rank's program.
    """

    def __init__(self, module: Module, work: ProgramWork) -> None:
        ranks = range(module.world)
        self._ops = work.program.ops
        self._functions = LocalFunctions(module)
        self._parts: dict[Assemble, dict[int, list[tuple[Value, Region]]]] = {}
        self._types: dict[object, Type] = {}
        self._futures: dict[object, Type] = {}
        # By identity, as equal types and regions are mostly one object, which the entry keeps
        # alive.
        self._local: dict[tuple[int, int], tuple[TensorType, Type]] = {}
        self._within: dict[tuple[int, int], tuple[Region, Region, Region]] = {}
        self._whole: dict[tuple[int, ...], Region] = {}
        self._sequence: dict[int, int] = {}
        self.programs: list[list[Op]] = [[] for _ in ranks]
        self.params: list[list[Value]] = [[] for _ in ranks]
        self._values: list[dict[Value, Value]] = [{} for _ in ranks]
        # The futures that a rank has yet to wait for, in order, each with the op that made it.
        self._pending: list[dict[Value, Op]] = [{} for _ in ranks]
        self._lazy: dict[Value, Op] = {}
        self._waits: dict[Value, Wait] = {}
        self._recvs: dict[tuple[int, int], Recv] = {}
        self._tasks: dict[Value, Task] = {}
        for index in work.lazy:
            self._lazy.update(dict.fromkeys(self._ops[index].results, self._ops[index]))
        for op in self._ops:
            if isinstance(op, Wait):
                self._waits[op.operands[0]] = op
            elif isinstance(op, Recv):
                self._recvs[op.chan, op.seq] = op
            elif op.task is not None:
                self._tasks.update(dict.fromkeys(op.results, op.task))
            elif isinstance(op, Slice) and op.operands[0] in self._tasks:
                self._tasks[op.result] = self._tasks[op.operands[0]]
        _unite_types(self._ops)
        for value in work.program.params:
            place = value.type.place
            for rank in ranks if place is None else place.ranks:
                self.params[rank] += self._define(rank, (value,))

    def add(self, op: Op) -> None:
        """Append a node or an early op, and the ops that go with it, to the ranks' programs."""
        if isinstance(op, Send):
            self._add_message(op)
        elif isinstance(op, Collective):
            self._add_collective(op)
        elif op.place is not None:
            ranks = op.place.ranks
            if len(ranks) > 1 and isinstance(op, Call):
                self._functions.note(op)
            for rank in ranks:
                self._append(op, rank, op.task)

    def finish(self) -> None:
        """End each program: wait for the remaining futures, and return."""
        closing = self._ops[-1]
        assert isinstance(closing, Return), "a program ends in return"
        for rank, program in enumerate(self.programs):
            delivers = closing.at is None or rank in closing.at
            operands = closing.operands if delivers else ()
            taken = tuple(self._take(value, rank, None) for value in operands)
            for future in list(self._pending[rank]):
                if future in self._waits:
                    self._append(self._waits[future], rank, None)
            program.append(Return(taken, loc=closing.loc))
        self._functions.finish()

    def _add_message(self, op: Send) -> None:
        recv = self._recvs[op.chan, op.seq]
        number = self._sequence.get(op.chan, 0)
        self._sequence[op.chan] = number + 1
        sender, receiver = recv.peer, op.peer
        task = self._tasks.get(op.operands[0])
        sent = self._append(op, sender, task)
        received = self._append(recv, receiver, None)
        assert isinstance(sent, Send)
        assert isinstance(received, Recv)
        sent.seq = received.seq = number
        self._pending[receiver][recv.result] = received
        self._wait(op.result, sender, task)

    def _add_collective(self, op: Collective) -> None:
        assert op.chan is not None, "an asynchronous collective has a channel"
        number = self._sequence.get(op.chan, 0)
        self._sequence[op.chan] = number + 1
        receivers = op.exchange.receivers
        for rank, (operands, results) in op.by_rank().items():
            taken = tuple([self._take(value, rank, op.task) for value in operands])
            local_op = copy_op(op, taken, self._define(rank, results))
            assert isinstance(local_op, Collective)
            local_op.seq = number
            self.programs[rank].append(local_op)
            for future in results:
                self._pending[rank][future] = local_op
                if rank not in receivers:
                    self._wait(future, rank, op.task)

    def _wait(self, future: Value, rank: int, task: Task | None) -> None:
        wait = self._waits.get(future)
        if wait is not None:
            self._append(wait, rank, task)

    def _append(self, op: Op, rank: int, task: Task | None) -> Op:
        """Append an op to a rank's program, after the lazy ops that it needs."""
        values = self._values[rank]
        operands = []
        for value in op.operands:
            here = values.get(value)
            operands.append(self._take(value, rank, task) if here is None else here)
        local_op = copy_op(op, tuple(operands), self._define(rank, op.results))
        if type(op) is Call and self._functions.are_needed:
            assert isinstance(local_op, Call), "a copy is of the same class"
            local_op.fn = self._functions.of(op, rank)
        if type(op) is Wait:
            promise = self._pending[rank].pop(op.operands[0], None)
            if promise is not None and promise.task is None:
                promise.task = task
        local_op.task = task
        self.programs[rank].append(local_op)
        return local_op

    def _take(self, value: Value, rank: int, task: Task | None) -> Value:
        """The value of a rank's program for `value`; lazy ops that make it are appended first."""
        values = self._values[rank]
        stack = [value]
        while stack:
            top = stack[-1]
            if top in values:
                stack.pop()
                continue
            maker = self._lazy[top]
            needed = maker.operands
            if isinstance(maker, Assemble):
                needed = tuple([operand for operand, _ in self._parts_at(maker, rank)])
            missing = [operand for operand in needed if operand not in values]
            if missing:
                stack += missing
            elif isinstance(maker, Slice):
                self._append_slice(maker, rank, task)
            elif isinstance(maker, Assemble):
                self._append_assemble(maker, rank, task)
            else:
                self._append(maker, rank, task)
        return values[value]

    def _append_slice(self, op: Slice, rank: int, task: Task | None) -> None:
        (source,) = op.operands
        assert isinstance(source.type, TensorType), "a slice is of a tensor"
        held = self._values[rank][source]
        region = self._placed_in(op.region, self._region(source.type, rank))
        if region == self._all_of(_shape(held)):
            self._values[rank][op.result] = held
            return
        local_op = copy_op(op, (held,), self._define(rank, op.results))
        assert isinstance(local_op, Slice), "a copy is of the same class"
        local_op.region, local_op.task = region, task
        self.programs[rank].append(local_op)

    def _append_assemble(self, op: Assemble, rank: int, task: Task | None) -> None:
        assert isinstance(op.result.type, TensorType), "an assemble makes a tensor"
        piece = self._region(op.result.type, rank)
        pairs = self._parts_at(op, rank)
        parts = [(value, self._placed_in(region, piece)) for value, region in pairs]
        values = self._values[rank]
        if len(parts) == 1:  # the only part is the whole
            values[op.result] = values[parts[0][0]]
            return
        operands = tuple([values[value] for value, _ in parts])
        local_op = copy_op(op, operands, self._define(rank, op.results))
        assert isinstance(local_op, Assemble), "a copy is of the same class"
        local_op.regions, local_op.task = tuple([region for _, region in parts]), task
        self.programs[rank].append(local_op)

    def _region(self, type_: TensorType, rank: int) -> Region:
        """The part of a tensor that a rank holds."""
        return self._all_of(type_.shape) if type_.layout is None else type_.region(rank)

    def _all_of(self, shape: tuple[int, ...]) -> Region:
        region = self._whole.get(shape)
        if region is None:
            region = self._whole[shape] = whole(shape)
        return region

    def _placed_in(self, part: Region, held: Region) -> Region:
        """Where a part of the logical tensor is in the tensor of a rank that holds `held`."""
        entry = self._within.get((id(part), id(held)))
        if entry is None:
            entry = self._within[id(part), id(held)] = part, held, within(part, held)
        return entry[2]

    def _parts_at(self, op: Assemble, rank: int) -> list[tuple[Value, Region]]:
        """The operands of an assemble at a rank that are not empty, each with its region."""
        parts_of = self._parts.get(op)
        if parts_of is None:
            parts_of = self._parts[op] = {
                at: [part for part in parts if volume(part[1])]
                for at, parts in op.by_rank().items()
            }
        return parts_of[rank]

    def _define(self, rank: int, originals: Sequence[Value]) -> tuple[Value, ...]:
        values = self._values[rank]
        defined = []
        for value in originals:
            new = values[value] = Value(value.name, self._bare(value.type, rank))
            defined.append(new)
        return tuple(defined)

    def _bare(self, type_: Type, rank: int) -> Type:
        """The local type of a value at a rank; equal types are one object, found by cheap keys."""
        inner = type_.value if isinstance(type_, FutureType) else type_
        key: object = type(inner)
        if isinstance(inner, TensorType):
            if inner.layout is not None:  # a value, as no future promises a laid-out tensor
                known = self._local.get((id(inner), rank))
                if known is None:
                    local_type = inner.local(rank)
                    local = self._types.setdefault((local_type.dtype, local_type.shape), local_type)
                    known = self._local[id(inner), rank] = inner, local
                return known[1]
            key = (inner.dtype, inner.shape)
        table = self._futures if inner is not type_ else self._types
        bare_type = table.get(key)
        if bare_type is None:
            bare_type = table[key] = relocate(type_, None)
        return bare_type


def _unite_types(ops: Sequence[Op]) -> None:
    """Give values of equal laid-out types one type object, which computes its regions once."""
    known: dict[Type, Type] = {}
    for op in ops:
        for value in op.results:
            type_ = value.type
            if type(type_) is TensorType and type_.layout is not None:
                value.type = known.setdefault(type_, type_)


def _shape(value: Value) -> tuple[int, ...]:
    assert isinstance(value.type, TensorType), "a slice is of a tensor"
    return value.type.shape
