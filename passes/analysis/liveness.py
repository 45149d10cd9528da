"""Find the last use of each storage of a rank's program."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...ir.ops import (
    Asynchronous,
    Call,
    Constant,
    CopyStart,
    Op,
    Recv,
    Return,
    Slice,
    Value,
    View,
    Wait,
)
from ...ir.ops.module import Function, FunctionKind, Program
from ...ir.ops.storage import SharedStorage
from ...ir.types import FutureType, TensorType, UnitType, is_on_host

# A tuple, as a union of classes would be built anew for each op.
_PARTS = (View, Slice)


@dataclass(eq=False, slots=True)
class LiveStorage:
    """The storage of a value and of all values that may alias it.

    Attributes:
        owners: the values that may have brought in storage for the program to free, in the order
            in which they are made. Views and waits between streams bring in no storage, and
            parameters and constants of the step are not the program's to free. A slice counts, as
            it may be a copy.
        last: the index of the last op that needs the storage: an op that makes or takes it, or
            that waits for a communication which reads it.
        reads: units which say that a communication has read it.
        slots: the receives that may have brought it in a slot.
        escapes: whether it is used after the end of the program, or for an unknown time.
    """

    owners: list[Value] = field(default_factory=list)
    last: int = -1
    reads: list[Value] = field(default_factory=list)
    slots: list[Recv] = field(default_factory=list)
    escapes: bool = False


def _fills(op: Op) -> bool:
    """True if the op's second operand is memory that it writes to, and does not read."""
    return isinstance(op, CopyStart) and op.memory is not None


class Received:
    """The receives of a program by the storage of what they bring; none are into buffers."""

    def __init__(self, program: Program, functions: Mapping[str, Function]) -> None:
        self._group_of = SharedStorage(program, functions, collectives=True).of
        self._receives: dict[Value, list[Recv]] = {}
        futures: dict[Value, Recv] = {}
        for op in program.ops:
            if isinstance(op, Recv):
                if not op.operands:
                    futures[op.result] = op
            elif isinstance(op, Wait) and (recv := futures.get(op.operands[0])) is not None:
                for value in op.results:
                    if isinstance(value.type, TensorType):
                        self._receives.setdefault(self._group_of(value), []).append(recv)

    def of(self, value: Value) -> Sequence[Recv]:
        """Those that may have brought the storage of a value."""
        return self._receives.get(self._group_of(value), ())


class Storages:
    """The storages of a program."""

    def __init__(self, program: Program, functions: Mapping[str, Function]) -> None:
        self._group_of = SharedStorage(program, functions, collectives=True).of
        # By the value that represents the group.
        self._groups: dict[Value, LiveStorage] = {}
        self._storage: dict[Value, LiveStorage] = {}
        self._makers: dict[Value, Op] = {}
        # Futures of communications that read a value and have not been waited for.
        self._reading: dict[Value, tuple[Value, ...]] = {}
        self._from_outside = set(program.params)
        for value in program.params:
            self._make(value, -1, owner=False)
        for index, op in enumerate(program.ops):
            self._visit(op, index)
        self._escape(itertools.chain.from_iterable(self._reading.values()))

    def of(self, value: Value) -> LiveStorage | None:
        """The storage of a value; None for units and futures."""
        return self._storage.get(value)

    def all(self) -> Collection[LiveStorage]:
        """Each storage once, in the order in which they are made."""
        return self._groups.values()

    def _visit(self, op: Op, index: int) -> None:
        for value in op.operands:
            storage = self._storage.get(value)
            if storage is not None:
                storage.last = index
        if isinstance(op, Wait):
            self._visit_wait(op, index)
        elif isinstance(op, Asynchronous):
            self._makers[op.result] = op
            if op.operands and not isinstance(op, Recv):
                self._reading[op.result] = op.operands[:1] if _fills(op) else op.operands
        elif isinstance(op, Return):
            self._escape(op.operands)
        else:
            is_given = self._is_given(op)
            if is_given:
                self._from_outside.update(op.results)
            for value in op.results:
                self._make(value, index, owner=not is_given and not isinstance(op, View))

    def _is_given(self, op: Op) -> bool:
        """True if the results of an op are storage that the program is given, or parts of it."""
        if isinstance(op, _PARTS):
            return self._from_outside.issuperset(op.operands)
        return isinstance(op, Constant) and op.ref is not None

    def _visit_wait(self, op: Wait, index: int) -> None:
        (source,) = op.operands
        result = op.results[0] if op.results else None
        read = self._reading.pop(source, None)
        if read is not None:
            storages = dict.fromkeys(map(self.of, read))
            for storage in storages:
                if storage is None:
                    continue
                storage.last = index
                if result is not None and isinstance(result.type, UnitType):
                    storage.reads.append(result)
        if result is not None:
            maker = self._makers.get(source)  # of the future, if it is one
            owned = self._make(result, index, owner=maker is not None)
            is_tensor = isinstance(result.type, TensorType)
            if owned is not None and is_tensor and isinstance(maker, Recv) and not maker.operands:
                owned.slots.append(maker)

    def _make(self, value: Value, index: int, owner: bool) -> LiveStorage | None:
        if isinstance(value.type, (UnitType, FutureType)):
            return None
        group = self._group_of(value)
        storage = self._groups.get(group)
        if storage is None:
            storage = self._groups[group] = LiveStorage()
        self._storage[value] = storage
        storage.last = index
        if owner:
            storage.owners.append(value)
        return storage

    def _escape(self, values: Iterable[Value]) -> None:
        for value in values:
            if (storage := self.of(value)) is not None:
                storage.escapes = True


def at_rest(
    program: Program, functions: Mapping[str, Function], storages: Storages
) -> dict[LiveStorage, LiveStorage]:
    """The storages in the memory of the host where state of an actor rests, each with its first.

    All that functions hand over of one actor counts as one memory. A program does not free it.
    """
    first: dict[str | None, LiveStorage] = {}
    same: dict[LiveStorage, LiveStorage] = {}
    for op in program.ops:
        function = functions[op.fn.name] if isinstance(op, Call) else None
        if function is None or function.kind is not FunctionKind.HOST:
            continue
        for value in op.results:
            storage = storages.of(value)
            if storage is not None and is_on_host(value.type):
                same[storage] = first.setdefault(function.actor, storage)
    return same
