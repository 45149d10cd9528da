"""Receive messages into the tensors that are assembled from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import ClassVar

from ...ir.layout import Region, shape_of, within
from ...ir.ops import Assemble, Copy, Free, Op, Recv, Reserve, Slice, Value, Wait
from ...ir.ops.module import Module, Program
from ...ir.ops.names import Names
from ...ir.phases import Phase
from ...ir.text.diagnostics import error
from ...ir.types import FutureType, TensorType
from ..base import Pass
from ..placement.fabrics import Fabrics


@dataclass(frozen=True)
class AssembleInPlace(Pass):
    """Assemble tensors from messages in place, so that no message is copied without need.

    The pass reserves the tensor's storage before the first of its messages is posted. A message
    between devices is received into its part of the storage, if that part is contiguous. All other
    parts are copied: those that the rank has itself ahead of the first wait, while messages travel,
    and messages that come elsewhere once they are there. So each byte is copied at most once.

    Hosts read a message where the sender has put it, in a slot or in lent memory, and copy it once,
    to its part of the tensor. They receive nothing in place, and a whole that is reserved early
    would only take memory. So nothing changes without devices, or where a tensor is assembled from
    no message.

    With `ranks=nccl+nccl`, where channel 0 goes by NCCL:

    Before::

        %v.recv = recv() {chan = 0, peer = 1, seq = 0} : future<f32[2,4]>
        %v = wait(%v.recv) : f32[2,4]
        %y = assemble(%x, %v) {regions = {[0:2,0:4], [2:4,0:4]}} : f32[4,4]

    After::

        %y.whole, %y.part, %y.part.1 = reserve() {regions = {[0:2,0:4], [2:4,0:4]}} : ...
        %v.recv = recv(%y.part.1) {chan = 0, peer = 1, seq = 0} : future<f32[2,4]>
        %x.there = copy(%x, %y.part) : f32[2,4]
        %v = wait(%v.recv) : f32[2,4]
        %y = assemble(%y.whole, %x.there, %v) {regions = {[0:2,0:4], [2:4,0:4]}} : f32[4,4]

    Attributes:
        ranks: as in `Fabrics`; only these transports receive into a buffer.
    """

    ranks: str = ""

    name: ClassVar[str] = "assemble-in-place"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.SCHEDULED,)
    optional: ClassVar[bool] = True

    def run(self, module: Module) -> bool:
        fabrics = Fabrics(self.ranks)
        direct = {
            id_
            for id_, channel in module.channels.items()
            if channel.via is not None and fabrics.knows(channel.via)
        }
        if not direct:
            return False
        changed = [_rewrite(program, direct) for program in module.programs]
        return any(changed)


@dataclass(slots=True)
class _ValueUses:
    """Where a program makes and uses its values.

    Attributes:
        made_at: for each value the index of the op that makes it.
        counts: for each value the number of operands that it is.
        posted: for each value that a wait gives, the index of the receive of its message.
    """

    made_at: dict[Value, int] = field(default_factory=dict)
    counts: dict[Value, int] = field(default_factory=dict)
    posted: dict[Value, int] = field(default_factory=dict)


def _rewrite(program: Program, direct: set[int]) -> bool:
    """Assemble in place the tensors that a program assembles from messages."""
    ops = program.ops
    if not any(isinstance(op, Assemble) and not op.is_in_place for op in ops):
        return False
    uses = _uses_of(program)
    ahead: dict[int, list[Op]] = {}
    names: Names | None = None
    for index, op in enumerate(ops):
        if not isinstance(op, Assemble) or op.is_in_place:
            continue
        waits = [uses.made_at[value] for value in op.operands if _is_awaited(value, ops, uses)]
        if waits:
            names = names or Names.of(program)
            _Assembly(op, index, min(waits), ops, uses, direct, names).place(ahead)
    program.ops[:] = [
        op for index, original in enumerate(ops) for op in (*ahead.get(index, ()), original)
    ]
    return bool(ahead)


def _uses_of(program: Program) -> _ValueUses:
    uses = _ValueUses()
    for index, op in enumerate(program.ops):
        if isinstance(op, Free) or op.stream is not None:
            raise error(
                "assemble-in-place cannot reserve storage in a program that is planned already",
                op=op,
                program=program,
                help="run assemble-in-place before assign-streams and plan-buffers",
            )
        for value in op.operands:
            uses.counts[value] = uses.counts.get(value, 0) + 1
        for value in op.results:
            uses.made_at[value] = index
        if isinstance(op, Wait) and op.results:
            posted = uses.made_at[op.operands[0]]
            if isinstance(program.ops[posted], Recv):
                uses.posted[op.result] = posted
    return uses


def _is_awaited(value: Value, ops: Sequence[Op], uses: _ValueUses) -> bool:
    """True if a value comes from other ranks."""
    at = uses.made_at.get(value)
    return at is not None and _is_arrival(ops[at])


def _is_arrival(op: Op) -> bool:
    return isinstance(op, Wait) and isinstance(op.operands[0].type, FutureType)


class _Assembly:
    """Puts one tensor together in place.

    Args:
        op: the assemble, which becomes one in place.
        at: its index in the program.
        arrival: the index of the first wait for one of its parts.
        ops: the ops of the program.
        uses: where the program makes and uses its values.
        direct: the channels whose messages may come into a buffer.
        names: the names of the program.
    """

    def __init__(
        self,
        op: Assemble,
        at: int,
        arrival: int,
        ops: Sequence[Op],
        uses: _ValueUses,
        direct: set[int],
        names: Names,
    ) -> None:
        self._op = op
        self._at = at
        self._arrival = arrival
        self._ops = ops
        self._uses = uses
        self._direct = direct
        self._names = names

    def place(self, ahead: dict[int, list[Op]]) -> None:
        """Add the new ops to `ahead`, by the index of the op that they precede."""
        op, type_ = self._op, self._op.result.type
        assert isinstance(type_, TensorType), "an assemble makes a tensor"
        results = [self._new("whole", type_)]
        regions: list[Region] = []
        parts: list[Value] = []
        first = self._arrival
        copies: list[tuple[int, Op]] = []
        for value, region in zip(op.operands, op.regions, strict=True):
            boxes = blocks(region)
            for box in boxes:
                block = TensorType(type_.dtype, shape_of(box))
                buffer = self._new("part", block)
                results.append(buffer)
                regions.append(box)
                posted = self._posted(value, region, type_.shape)
                if posted is not None:
                    recv = self._ops[posted]
                    recv.operands = (buffer,)
                    first = min(first, posted)
                    parts.append(value)
                    continue
                where = self._where(value)
                source = value
                if len(boxes) > 1:
                    source = self._new("piece", block)
                    copies.append((where, Slice((value,), (source,), region=within(box, region))))
                there = self._new("there", block)
                copies.append((where, Copy((source, buffer), (there,))))
                parts.append(there)
        reserve = Reserve((), tuple(results), regions=tuple(regions))
        for index, new_op in ((first, reserve), *copies):
            new_op.loc, new_op.mb, new_op.task = op.loc, op.mb, op.task
            ahead.setdefault(index, []).append(new_op)
        op.operands, op.regions = (results[0], *parts), tuple(regions)

    def _posted(self, value: Value, region: Region, shape: tuple[int, ...]) -> int | None:
        """The index of the receive that may bring a value into its part; None if it is copied."""
        posted = self._uses.posted.get(value)
        if posted is None or self._uses.counts[value] > 1 or not is_contiguous(region, shape):
            return None
        recv = self._ops[posted]
        assert isinstance(recv, Recv), "messages come by receives"
        alone = self._uses.counts[recv.result] == 1 and not recv.operands
        return posted if alone and recv.chan in self._direct else None

    def _where(self, value: Value) -> int:
        """The index of the op that the copy of a value precedes."""
        made_at = self._uses.made_at.get(value, -1)
        is_own = not (made_at >= 0 and _is_arrival(self._ops[made_at]))
        return self._arrival if is_own and made_at < self._arrival else self._at

    def _new(self, suffix: str, type_: TensorType) -> Value:
        return Value(self._names.fresh(f"{self._op.result.name}.{suffix}"), type_)


def blocks(region: Region) -> list[Region]:
    """The blocks that a region consists of, in order."""
    pieces = [[(interval,) for interval in intervals] for intervals in region]
    return [tuple(block) for block in product(*pieces)]


def is_contiguous(region: Region, shape: tuple[int, ...]) -> bool:
    """True if a block of a contiguous tensor is contiguous."""
    if any(len(intervals) != 1 for intervals in region):
        return False
    sizes = shape_of(region)
    cut = [dim for dim, size in enumerate(shape) if sizes[dim] != size]
    return not cut or all(size == 1 for size in sizes[: cut[-1]])
