"""Project one global order onto ranks, to get a program for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from ...ir.alike.alike_programs import share
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

    Ranks are projected one after the other, and of programs that are alike one is kept.
    """
    projector = _Projector(module, work)
    turns = projector.turns(order)
    programs = (projector.program_of(rank, turns.pop(rank, ())) for rank in range(module.world))
    module.programs = share(programs, module.channels)
    projector.finish()
    module.phase = Phase.SCHEDULED


_Turn: TypeAlias = tuple[Op, int, tuple[tuple[Value, ...], tuple[Value, ...]]]
"""An op when a rank comes to it: with its number if it is one of a channel's, and with what the
rank gives and gets if it is a collective."""

_NO_ENDS: tuple[tuple[Value, ...], tuple[Value, ...]] = (), ()


class _Projector:
    """Makes the programs of ranks, one after the other.

    `_values` maps the values of the program over all ranks to those of the rank's program.
    """

    def __init__(self, module: Module, work: ProgramWork) -> None:
        self._program = work.program
        self._ops = work.program.ops
        self._functions = LocalFunctions(module)
        self._parts: dict[Assemble, dict[int, list[tuple[Value, Region]]]] = {}
        self._types: dict[object, Type] = {}
        self._futures: dict[object, Type] = {}
        # By identity, as equal types and regions are mostly one object, which the entry keeps
        # alive.
        self._local: dict[int, tuple[TensorType, Type]] = {}
        self._within: dict[tuple[int, int], tuple[Region, Region, Region]] = {}
        self._whole: dict[tuple[int, ...], Region] = {}
        self._rank = 0
        self._local_ops: list[Op] = []
        self._values: dict[Value, Value] = {}
        # The futures that the rank has yet to wait for, in order, each with the op that made it.
        self._pending: dict[Value, Op] = {}
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

    def turns(self, order: Sequence[int]) -> dict[int, list[_Turn]]:
        """For each rank the nodes and early ops of its program, in order."""
        turns: defaultdict[int, list[_Turn]] = defaultdict(list)
        sequence: dict[int, int] = {}
        for op in map(self._ops.__getitem__, order):
            number = -1
            if isinstance(op, (Send, Collective)):
                assert op.chan is not None, "an asynchronous collective has a channel"
                number = sequence.get(op.chan, 0)
                sequence[op.chan] = number + 1
            if isinstance(op, Send):
                recv = self._recvs[op.chan, op.seq]
                turns[recv.peer].append((op, number, _NO_ENDS))
                turns[op.peer].append((recv, number, _NO_ENDS))
            elif isinstance(op, Collective):
                for rank, ends in op.by_rank().items():
                    turns[rank].append((op, number, ends))
            elif op.place is not None:
                if len(op.place.ranks) > 1 and isinstance(op, Call):
                    self._functions.note(op)
                turn = (op, number, _NO_ENDS)
                for rank in op.place.ranks:
                    turns[rank].append(turn)
        return turns

    def program_of(self, rank: int, turns: Iterable[_Turn]) -> Program:
        """The program of a rank.

        Args:
            rank: the rank.
            turns: the nodes and early ops of its program; the ops that go with them are added.
        """
        self._rank, self._local_ops = rank, []
        self._values, self._pending, self._local = {}, {}, {}
        params = [
            self._define((value,))[0]
            for value in self._program.params
            if value.type.place is None or rank in value.type.place.ranks
        ]
        for op, number, ends in turns:
            if isinstance(op, Send):
                self._add_send(op, number)
            elif isinstance(op, Recv):
                self._add_recv(op, number)
            elif isinstance(op, Collective):
                self._add_collective(op, number, ends)
            else:
                self._append(op, op.task)
        self._end()
        return Program(self._program.name, params, self._local_ops, rank)

    def _end(self) -> None:
        """Wait for the remaining futures, and return."""
        closing = self._ops[-1]
        assert isinstance(closing, Return), "a program ends in return"
        delivers = closing.at is None or self._rank in closing.at
        operands = closing.operands if delivers else ()
        taken = tuple([self._take(value, None) for value in operands])
        for future in list(self._pending):
            if future in self._waits:
                self._append(self._waits[future], None)
        self._local_ops.append(Return(taken, loc=closing.loc))

    def finish(self) -> None:
        """Declare the functions that ranks call."""
        self._functions.finish()

    def _add_send(self, op: Send, number: int) -> None:
        task = self._tasks.get(op.operands[0])
        sent = self._append(op, task)
        assert isinstance(sent, Send), "a copy is of the same class"
        sent.seq = number
        self._wait(op.result, task)

    def _add_recv(self, op: Recv, number: int) -> None:
        received = self._append(op, None)
        assert isinstance(received, Recv), "a copy is of the same class"
        received.seq = number
        self._pending[op.result] = received

    def _add_collective(
        self,
        op: Collective,
        number: int,
        ends: tuple[tuple[Value, ...], tuple[Value, ...]],
    ) -> None:
        operands, results = ends
        taken = tuple([self._take(value, op.task) for value in operands])
        local_op = copy_op(op, taken, self._define(results))
        assert isinstance(local_op, Collective), "a copy is of the same class"
        local_op.seq = number
        self._local_ops.append(local_op)
        only_gives = self._rank not in op.exchange.receivers
        for future in results:
            self._pending[future] = local_op
            if only_gives:
                self._wait(future, op.task)

    def _wait(self, future: Value, task: Task | None) -> None:
        wait = self._waits.get(future)
        if wait is not None:
            self._append(wait, task)

    def _append(self, op: Op, task: Task | None) -> Op:
        """Append an op to the rank's program, after the lazy ops that it needs."""
        values = self._values
        operands = []
        for value in op.operands:
            here = values.get(value)
            operands.append(self._take(value, task) if here is None else here)
        local_op = copy_op(op, tuple(operands), self._define(op.results))
        if type(op) is Call and self._functions.are_needed:
            assert isinstance(local_op, Call), "a copy is of the same class"
            local_op.fn = self._functions.of(op, self._rank)
        if type(op) is Wait:
            promise = self._pending.pop(op.operands[0], None)
            if promise is not None and promise.task is None:
                promise.task = task
        local_op.task = task
        self._local_ops.append(local_op)
        return local_op

    def _take(self, value: Value, task: Task | None) -> Value:
        """The value of the rank's program for `value`; lazy ops that make it are appended first."""
        values = self._values
        stack = [value]
        while stack:
            top = stack[-1]
            if top in values:
                stack.pop()
                continue
            maker = self._lazy[top]
            needed = maker.operands
            if isinstance(maker, Assemble):
                needed = tuple([operand for operand, _ in self._parts_at(maker)])
            missing = [operand for operand in needed if operand not in values]
            if missing:
                stack += missing
            elif isinstance(maker, Slice):
                self._append_slice(maker, task)
            elif isinstance(maker, Assemble):
                self._append_assemble(maker, task)
            else:
                self._append(maker, task)
        return values[value]

    def _append_slice(self, op: Slice, task: Task | None) -> None:
        (source,) = op.operands
        assert isinstance(source.type, TensorType), "a slice is of a tensor"
        held = self._values[source]
        region = self._placed_in(op.region, self._region(source.type))
        if region == self._all_of(_shape(held)):
            self._values[op.result] = held
            return
        local_op = copy_op(op, (held,), self._define(op.results))
        assert isinstance(local_op, Slice), "a copy is of the same class"
        local_op.region, local_op.task = region, task
        self._local_ops.append(local_op)

    def _append_assemble(self, op: Assemble, task: Task | None) -> None:
        assert isinstance(op.result.type, TensorType), "an assemble makes a tensor"
        piece = self._region(op.result.type)
        pairs = self._parts_at(op)
        parts = [(value, self._placed_in(region, piece)) for value, region in pairs]
        values = self._values
        if len(parts) == 1:  # the only part is the whole
            values[op.result] = values[parts[0][0]]
            return
        operands = tuple([values[value] for value, _ in parts])
        local_op = copy_op(op, operands, self._define(op.results))
        assert isinstance(local_op, Assemble), "a copy is of the same class"
        local_op.regions, local_op.task = tuple([region for _, region in parts]), task
        self._local_ops.append(local_op)

    def _region(self, type_: TensorType) -> Region:
        """The part of a tensor that the rank holds."""
        return self._all_of(type_.shape) if type_.layout is None else type_.region(self._rank)

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

    def _parts_at(self, op: Assemble) -> list[tuple[Value, Region]]:
        """The operands of an assemble at the rank that are not empty, each with its region."""
        parts_of = self._parts.get(op)
        if parts_of is None:
            parts_of = self._parts[op] = {
                at: [part for part in parts if volume(part[1])]
                for at, parts in op.by_rank().items()
            }
        return parts_of[self._rank]

    def _define(self, originals: Sequence[Value]) -> tuple[Value, ...]:
        values = self._values
        defined = []
        for value in originals:
            new = values[value] = Value(value.name, self._bare(value.type))
            defined.append(new)
        return tuple(defined)

    def _bare(self, type_: Type) -> Type:
        """The local type of a value at the rank; equal types are one object."""
        inner = type_.value if isinstance(type_, FutureType) else type_
        key: object = type(inner)
        if isinstance(inner, TensorType):
            if inner.layout is not None:  # a value, as no future promises a laid-out tensor
                known = self._local.get(id(inner))
                if known is None:
                    local_type = inner.local(self._rank)
                    local = self._types.setdefault((local_type.dtype, local_type.shape), local_type)
                    known = self._local[id(inner)] = inner, local
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
