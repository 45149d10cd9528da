"""Refuse scheduled programs that write or free storage which may still be in use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar

from ...ir.alike.alike_programs import alike_programs_of
from ...ir.ops import (
    Alloc,
    AllReduce,
    Call,
    Collective,
    Constant,
    Copy,
    CopyStart,
    Free,
    Op,
    Recv,
    Return,
    Send,
    Slice,
    Value,
    View,
    Wait,
)
from ...ir.ops.module import FunctionKind, Module, Program
from ...ir.phases import Phase
from ...ir.text.diagnostics import Diagnostic, IRError
from ...ir.types import TensorType
from ..analysis.happens_before import Clocks, HappensBefore, Line
from ..analysis.liveness import LiveStorage, Storages, at_rest
from ..base import Pass


@dataclass(frozen=True)
class CheckRaces(Pass):
    """Prove that no storage is used after it is freed, or freed or written while it is in use.

    An op uses its operands from its start to its end. A communication ends when it is complete.
    This is known after a wait for it, or after the arrival of another rank's message that could not
    have come earlier (`happens_before.py` has the rules). Values that may share storage
    count as one. The pass checks these rules:

    - No op uses storage that was freed earlier in the program.
    - When storage is freed, all of its uses are known to be over.
    - When a receive or a copy into a buffer starts, all uses of the buffer are over. No op uses the
      buffer before the write is complete, and no op uses the old value afterwards. The buffers of a
      `reserve` are separate storages until they are assembled. Storage that the program is given
      is no buffer.
    - The bytes of an `alloc` overlap with no other that is alive; if they were freed, the `free` is
      known to be over. They are only read as the result of a receive or copy.
    - A copy to the host, or back, uses its operand as a communication does.
    - The memory of the host where state of an actor rests is one storage.
    - A value that lives in a slot is not handed out as an output, or to an opaque call.
    - When an `all_reduce` with a donated operand starts, all uses of the operand are over, and only
      the result is used afterwards. The operand is the program's own, and in no slot.

    A slot itself cannot be overwritten too early: its next message waits for its `free`.

    Refused, for instance, as the message may not have left when its storage is freed::

        %h.send = send(%h) {chan = 0, peer = 1, seq = 0, stream = send} : future<unit>
        free(%h)
        %h.sent = wait(%h.send) {stream = compute} : unit

    Attributes:
        blocking: whether to rely on ranks that run all ops except communication in the order of
            the program, as CPUs do. Without it, programs that pass are safe on asynchronous devices
            as well.
    """

    blocking: bool = False

    name: ClassVar[str] = "check-races"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.SCHEDULED,)

    def run(self, module: Module) -> bool:
        alike = alike_programs_of(module)
        if alike is not None:
            by_itself = _Proof(module, self.blocking, asks_others=False)
            programs = alike.representatives
            if next(_problems(module, programs, by_itself), None) is None:
                return False
        proof = _Proof(module, self.blocking)
        if shown := list(islice(_problems(module, module.programs, proof), _SHOWN)):
            raise IRError(*shown)
        return False


_SHOWN = 16


def _problems(module: Module, programs: Sequence[Program], proof: _Proof) -> Iterator[Diagnostic]:
    for program in programs:
        yield from _RaceChecker(module, program, proof).run()


class _Proof:
    """Proves that ops are done by the order over all ranks, which is made when it is needed.

    With `asks_others=False` it proves nothing, so that each program has to prove all by itself.
    Programs that are alike then do so alike.
    """

    def __init__(self, module: Module, blocking: bool, asks_others: bool = True) -> None:
        self.blocking = blocking
        self._module = module
        self._asks_others = asks_others
        self._order: HappensBefore | None = None

    def is_done(self, program: Program, earlier: int, later: int) -> bool:
        if not self._asks_others:
            return False
        if self._order is None:
            self._order = HappensBefore(self._module, self.blocking)
        return self._order.is_done(program.rank or 0, earlier, later)


@dataclass(slots=True)
class _StorageUses:
    """The uses of a storage so far.

    Attributes:
        latest: for each line the index of the latest use.
        written: for each line the index of the latest op that made or wrote it.
        freed: the index of the op that freed it.
        values: the values in this storage so far.
    """

    latest: dict[Line, int] = field(default_factory=dict)
    written: dict[Line, int] = field(default_factory=dict)
    freed: int | None = None
    values: list[Value] = field(default_factory=list)


class _RaceChecker:
    """Checks one program, op by op."""

    def __init__(self, module: Module, program: Program, proof: _Proof) -> None:
        self._functions = module.functions
        self._program = program
        self._proof = proof
        self._clocks = Clocks.of(program, proof.blocking)
        self._storages = Storages(program, module.functions)
        self._uses: dict[LiveStorage, _StorageUses] = {}
        self._allocs: list[Alloc] = []
        self._makers: dict[Value, int] = {}
        # The values that the program is given, and views of them: it must not free them.
        self._from_outside = set(program.params)
        # The storages of such values; results of calls may be in them as well.
        self._lent = {self._storages.of(value) for value in program.params} - {None}
        # The results of `alloc`: storage without a value.
        self._empty: set[Value] = set()
        # For each value the op that has overwritten its storage, or may have.
        self._overwritten: dict[Value, int] = {}
        self._at_rest = at_rest(program, module.functions, self._storages)

    def run(self) -> Iterator[Diagnostic]:
        for index, op in enumerate(self._program.ops):
            if isinstance(op, Free):
                yield from self._free(index, op)
            elif isinstance(op, Wait):
                self._wait(op)
                self._pass_on(op)
            elif isinstance(op, Recv):
                for value in op.operands:
                    yield from self._fill(index, value)
            elif isinstance(op, Copy) and op.buffer is not None:
                yield from self._read(index, op.operands[0])
                yield from self._fill(index, op.buffer)
            elif isinstance(op, CopyStart) and op.memory is not None:
                yield from self._read(index, op.operands[0])
                yield from self._fill(index, op.memory)
            else:
                if isinstance(op, Alloc):
                    yield from self._alloc(index, op)
                donates = isinstance(op, AllReduce) and op.donated
                for value in op.operands:
                    yield from (self._donate if donates else self._read)(index, value)
                self._make(index, op)
                is_part = isinstance(op, (View, Slice))
                if is_part or (isinstance(op, Constant) and op.ref is not None):
                    self._pass_on(op)
                if isinstance(op, Alloc):
                    self._empty.update(op.results)
            for value in op.results:
                self._makers[value] = index
                if (uses := self._of(value)) is not None:
                    uses.values.append(value)

    def _pass_on(self, op: Op) -> None:
        if self._from_outside.issuperset(op.operands):
            self._from_outside.update(op.results)
            self._lent |= {self._storages.of(value) for value in op.results} - {None}
        if not self._empty.isdisjoint(op.operands):
            self._empty.update(op.results)

    def _of(self, value: Value) -> _StorageUses | None:
        storage = self._storages.of(value)
        if storage is None or value in self._from_outside:
            return None
        storage = self._at_rest.get(storage, storage)
        uses = self._uses.get(storage)
        if uses is None:
            uses = self._uses[storage] = _StorageUses()
        return uses

    def _make(self, index: int, op: Op) -> None:
        """Note the storage that an op writes, except where a result shares an operand's storage."""
        if isinstance(op, (View, Slice, Send, Collective, CopyStart)):
            return
        shared: set[int] = set()
        if isinstance(op, Call):
            shared = {output for output, _ in self._functions[op.fn.name].aliases}
        for number, value in enumerate(op.results):
            uses = self._of(value)
            if uses is not None and number not in shared:
                uses.written[self._clocks.lines[index]] = index

    def _wait(self, op: Wait) -> None:
        """A communication wrote the awaited value, unless it is the rank's operand."""
        source = self._makers.get(op.operands[0])
        if source is None or not op.results:
            return
        maker = self._program.ops[source]
        is_shared = isinstance(maker, Collective) and maker.shares_operand and maker.operands
        if isinstance(maker, Recv | Collective | CopyStart) and not is_shared:
            uses = self._of(op.result)
            if uses is not None:
                uses.written[self._clocks.lines[source]] = source

    def _read(self, index: int, value: Value) -> Iterator[Diagnostic]:
        uses = self._of(value)
        if uses is None:
            return
        yield from self._after_free(index, value, uses)
        yield from self._in_slot(index, value)
        if value in self._empty:
            yield self._problem(
                index,
                value,
                f"%{value.name} is read, but it is storage to which nothing has been written",
                (self._makers[value], "it is made here"),
                "read what the wait for the receive gives, or what the copy makes",
            )
        if value in self._overwritten:
            yield self._lost(index, value, self._overwritten[value])
        for earlier in uses.written.values():
            if not self._is_over(earlier, index):
                yield self._problem(
                    index,
                    value,
                    f"%{value.name} is used while it may still be written",
                    (earlier, "it is written here"),
                    "wait for what writes it, on the stream of what uses it",
                )
        uses.latest[self._clocks.lines[index]] = index

    def _fill(self, index: int, buffer: Value) -> Iterator[Diagnostic]:
        if self._storages.of(buffer) in self._lent:
            yield self._problem(
                index,
                buffer,
                f"%{buffer.name} is written here, but the program has been given its storage",
                None,
                "receive or copy into storage of the program's own",
            )
        yield from self._write(index, buffer)
        self._overwrite(index, buffer)

    def _overwrite(self, index: int, value: Value) -> None:
        """Keep in mind that an op overwrites the storage of the values that it has had so far."""
        if (uses := self._of(value)) is not None:
            self._overwritten.update(dict.fromkeys(uses.values, index))

    def _lost(self, index: int, value: Value, by: int) -> Diagnostic:
        if isinstance(self._program.ops[by], AllReduce):
            return self._problem(
                index,
                value,
                f"%{value.name} is used behind the all_reduce that it is donated to",
                (by, "which may write its result there"),
                "use it before, or do not donate it",
            )
        return self._problem(
            index,
            value,
            f"%{value.name} is used, but something else has been written to its storage",
            (by, "it is written here"),
            "use it before, or write to another buffer",
        )

    def _write(self, index: int, value: Value) -> Iterator[Diagnostic]:
        uses = self._of(value)
        if uses is None:
            return
        yield from self._after_free(index, value, uses)
        for earlier in {*uses.latest.values(), *uses.written.values()}:
            if not self._is_over(earlier, index):
                yield self._problem(
                    index,
                    value,
                    f"%{value.name} is written here while it may still be used",
                    (earlier, "it is used here"),
                    "wait for that use first, on the stream of what writes",
                )
        uses.latest[self._clocks.lines[index]] = index
        uses.written[self._clocks.lines[index]] = index

    def _donate(self, index: int, value: Value) -> Iterator[Diagnostic]:
        if self._storages.of(value) in self._lent:
            yield self._problem(
                index,
                value,
                f"%{value.name} is donated, which the program has been given",
                None,
                "donate only what the program makes",
            )
        yield from self._write(index, value)
        storage = self._storages.of(value)
        if storage is not None and any(recv.slot is not None for recv in storage.slots):
            yield self._problem(
                index,
                value,
                f"%{value.name} is donated, but it lives in a slot, which the next message needs",
                None,
                "copy it before, or do not donate it",
            )
        self._overwrite(index, value)

    def _free(self, index: int, op: Free) -> Iterator[Diagnostic]:
        value = op.operands[0]
        uses = self._of(value)
        if value in self._from_outside:
            yield self._problem(
                index,
                value,
                f"%{value.name} is freed, which the program has been given",
                None,
                "free only what the program makes or receives",
            )
        if uses is None or self._storages.of(value) in self._at_rest:
            return
        for earlier in {*uses.latest.values(), *uses.written.values()}:
            if not self._is_over(earlier, index):
                yield self._problem(
                    index,
                    value,
                    f"%{value.name} is freed while it may still be used",
                    (earlier, "this may not be over"),
                    "wait for that before, and name the unit that the wait gives in the free",
                )
        if uses.freed is None:
            uses.freed = index

    def _alloc(self, index: int, op: Alloc) -> Iterator[Diagnostic]:
        """Look for other storage that may be alive in the same bytes."""
        first, end = _bytes(op)
        for earlier in self._allocs:
            low, high = _bytes(earlier)
            held = self._of(earlier.result)
            if max(first, low) >= min(end, high) or held is None:
                continue
            if held.freed is not None and not self._is_over(held.freed, index):
                yield self._problem(
                    index,
                    op.result,
                    f"%{op.result.name} takes bytes {max(first, low)}..{min(end, high) - 1} of the "
                    f"arena, which %{earlier.result.name} may still have",
                    (held.freed, "this may not be over"),
                    "allocate it on the compute stream, where storage is freed, or choose another "
                    "offset",
                )
            elif held.freed is None:
                yield self._problem(
                    index,
                    op.result,
                    f"%{op.result.name} takes bytes {max(first, low)}..{min(end, high) - 1} of the "
                    f"arena, which %{earlier.result.name} still has",
                    (self._makers[earlier.result], "it is allocated here, and not freed before"),
                    "free it first, or choose another offset",
                )
        self._allocs.append(op)

    def _after_free(self, index: int, value: Value, uses: _StorageUses) -> Iterator[Diagnostic]:
        if uses.freed is not None:
            yield self._problem(
                index,
                value,
                f"%{value.name} is used after its storage was freed",
                (uses.freed, "it is freed here"),
                "free it after its last use",
            )

    def _in_slot(self, index: int, value: Value) -> Iterator[Diagnostic]:
        op = self._program.ops[index]
        opaque = isinstance(op, Call) and (self._functions[op.fn.name].kind is FunctionKind.OPAQUE)
        storage = self._storages.of(value)
        if storage is None or not (opaque or isinstance(op, Return)):
            return
        for recv in storage.slots:
            if recv.slot is not None:
                who = "an opaque call, which may keep it" if opaque else "whoever runs the program"
                yield self._problem(
                    index,
                    value,
                    f"%{value.name} is handed to {who}, but the next message in its slot "
                    "overwrites it",
                    (self._makers[recv.result], "it comes in a slot here"),
                    "copy it before",
                )

    def _is_over(self, earlier: int, later: int) -> bool:
        if self._clocks.is_done(earlier, later):
            return True
        return self._proof.is_done(self._program, earlier, later)

    def _problem(
        self,
        index: int,
        value: Value,
        message: str,
        cause: tuple[int, str] | None,
        help: str,
    ) -> Diagnostic:
        program = self._program
        notes: tuple[Diagnostic, ...] = ()
        if cause is not None:
            notes = (Diagnostic(cause[1], program.ops[cause[0]], program),)
        return Diagnostic(message, program.ops[index], program, value, help, notes=notes)


def _bytes(op: Alloc) -> tuple[int, int]:
    """The first byte of an alloc, and the byte behind its last."""
    type_ = op.result.type
    assert isinstance(type_, TensorType), "an alloc makes a tensor"
    return op.offset, op.offset + type_.nbytes
