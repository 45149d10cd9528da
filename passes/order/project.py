"""Cut one global order into a program for each rank."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.attributes import Task
from ...ir.clone import copy_op
from ...ir.module import Module, Program
from ...ir.ops import Collective, Op, Recv, Return, Send, Value, Wait
from ...ir.phases import Phase
from ...ir.types import TensorType, Type, promised, relocate
from .merge import Work


def project(module: Module, work: Work, order: Sequence[int]) -> None:
    """Make `module` one of scheduled programs: each op at each of its ranks, in `order`.

    A send stands beside its receive in the global order, with its wait behind it; a lazy op, such
    as the wait for a receive, stands before its first use on the rank. So the message of a wait
    that blocks is always one that both ranks have posted or are about to, and no rank waits
    for what comes later in the global order: the programs cannot deadlock.
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
    """The programs so far.

    `values[rank]` maps the values of the program over all ranks to those of the rank's program.
    """

    def __init__(self, module: Module, work: Work) -> None:
        ranks = range(module.world)
        self._ops = work.program.ops
        self._types: dict[object, Type] = {}
        self._futures: dict[object, Type] = {}
        self._sequence: dict[int, int] = {}
        self.programs: list[list[Op]] = [[] for _ in ranks]
        self.params: list[list[Value]] = [[] for _ in ranks]
        self._values: list[dict[Value, Value]] = [{} for _ in ranks]
        # Futures that a rank has yet to wait for, in order, with what they are the promise of.
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
        for value in work.program.params:
            place = value.type.place
            for rank in ranks if place is None else place.ranks:
                self.params[rank] += self._define(rank, (value,))

    def add(self, op: Op) -> None:
        """Append a node, or an early communication, with all that goes with it."""
        if isinstance(op, Send):
            self._add_message(op)
        elif isinstance(op, Collective):
            self._add_collective(op)
        elif op.place is not None:
            for rank in op.place.ranks:
                self._append(op, rank, op.task)

    def finish(self) -> None:
        """Wait for what nobody has used, and return."""
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
        for rank in op.group.ranks:
            operands, results = op.at(rank)
            taken = tuple([self._take(value, rank, op.task) for value in operands])
            made = copy_op(op, taken, self._define(rank, results))
            assert isinstance(made, Collective)
            made.seq = number
            self.programs[rank].append(made)
            for future in results:
                self._pending[rank][future] = made
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
        made = copy_op(op, tuple(operands), self._define(rank, op.results))
        if type(op) is Wait:
            promise = self._pending[rank].pop(op.operands[0], None)
            if promise is not None and promise.task is None:
                promise.task = task
        made.task = task
        self.programs[rank].append(made)
        return made

    def _take(self, value: Value, rank: int, task: Task | None) -> Value:
        """The rank's own value of `value`; lazy ops that make it are appended first."""
        values = self._values[rank]
        stack = [value]
        while stack:
            top = stack[-1]
            if top in values:
                stack.pop()
                continue
            maker = self._lazy[top]
            missing = [operand for operand in maker.operands if operand not in values]
            if missing:
                stack += missing
            else:
                self._append(maker, rank, task)
        return values[value]

    def _define(self, rank: int, originals: Sequence[Value]) -> tuple[Value, ...]:
        values = self._values[rank]
        made = []
        for value in originals:
            new = values[value] = Value(value.name, self._bare(value.type))
            made.append(new)
        return tuple(made)

    def _bare(self, type_: Type) -> Type:
        """A type without its place; equal ones are one, and hashing whole types is avoided."""
        inner = promised(type_)
        key: object = type(inner)
        if isinstance(inner, TensorType):
            # A dtype is the only one of its kind, and its identity hashes fast.
            key = (id(inner.dtype), inner.shape)
        table = self._types if inner is type_ else self._futures
        found = table.get(key)
        if found is None:
            found = table[key] = relocate(type_, None)
        return found
