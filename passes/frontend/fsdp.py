"""Gather stored parameters in buckets, for a task or a whole step, and reduce their gradients."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ...ir.attributes import Effect, Symbol, Task, Traffic
from ...ir.ops import Call, Op, Transfer, Value, builtins
from ...ir.ops.module import Function, Module
from ...ir.ops.names import Names
from ...ir.packing import LARGE, numel_at_rank, packed
from ...ir.phases import Phase
from ...ir.text.diagnostics import error
from ...ir.types import TensorType
from ..base import Pass
from .buckets import bucket_of, unmatched

STEP, TASK = "step", "task"


@dataclass(frozen=True)
class Fsdp(Pass):
    """Gather stored parameters once for several uses, in buckets, and reduce their gradients.

    After `inline` each use of a stored parameter gathers it, and each backward reduces its
    gradient. This pass makes one gather and one reduction for each *bucket*: flat pieces are
    packed, travel as one tensor, and are taken apart. Pieces of a mebibyte or more travel by
    themselves. With `keep=task` a bucket is gathered for each task of the schedule, that is for a
    forward and again for its backward, and its gradients are reduced in each backward. With
    `keep=step` a bucket is gathered once, before its first use, and stays. Its gradients are added
    up over all microbatches, and reduced behind the last one. In both cases, uses behind a call
    that may change the actor's parameters gather again.

    With `keep=step`, where each task gathers both `%b` and `%w` before this pass:

    Before::

        %w.rest = call() {fn = @a.w.rest, mb = 0, task = 0F0} : f32[8/dp]@m
        %w.full = transfer(%w.rest) {mb = 0} : f32[8]@m
        %w = call(%w.full) {fn = @a.w.whole, mb = 0, task = 0F0} : f32[4,2]@m

    After::

        %w.rest = call() {fn = @a.w.rest} : f32[8/dp]@m
        %b.rest = call() {fn = @a.b.rest} : f32[4/dp]@m
        %bucket = call(%w.rest, %b.rest) {fn = @builtin.pack.0} : f32[12/dp]@m
        %bucket.full = transfer(%bucket) {traffic = gather} : f32[12]@m
        %w.full, %b.full = call(%bucket.full) {fn = @builtin.unpack.2.0} : f32[8]@m, f32[4]@m
        %w = call(%w.full) {fn = @a.w.whole} : f32[4,2]@m
        %b = call(%b.full) {fn = @a.b.whole} : f32[4]@m

    Attributes:
        bucket: patterns of buckets, as in `bucket_of`.
        keep: `step` or `task`.
        regather, reduce: with `keep=step`, the buckets whose parameters are still gathered, or
            whose gradients are still reduced, for each task; written `actor/bucket`, with `+`
            between them.
        separate: whether gathers and reductions have communicators and streams of their own.
    """

    bucket: str = ""
    keep: str = TASK
    regather: str = ""
    reduce: str = ""
    separate: bool = True

    name: ClassVar[str] = "fsdp"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.TRACED,)

    def run(self, module: Module) -> bool:
        paths = sorted(stored_parameters(module))
        if missing := unmatched(self.bucket, paths):
            raise error(
                f"the bucket '{missing[0]}' matches no parameter that is stored in pieces",
                program=module.program,
                help=f"these are {', '.join(paths[:8]) or 'none'}",
            )
        transfers = [op for op in module.program.ops if isinstance(op, Transfer)]
        if not self.separate:
            for op in transfers:
                op.traffic = op.traffic if op.traffic is Traffic.RING else None
        if not paths:
            return not self.separate and bool(transfers)
        return _Rewriter(self, module).run()

    def keeps(self, actor: str, bucket: str, purpose: str) -> bool:
        """True if a bucket's gather or reduction spans a whole step.

        Args:
            actor: the actor of the bucket.
            bucket: the bucket.
            purpose: `regather` for its gather, or `reduce` for its reduction.
        """
        listed = self.regather if purpose == "regather" else self.reduce
        return self.keep == STEP and f"{actor}/{bucket}" not in listed.split("+")


def stored_parameters(module: Module) -> set[str]:
    """The paths of the parameters that are stored in pieces."""
    functions = module.functions.values()
    return {f.parameter for f in functions if f.parameter is not None and f.effect is Effect.READ}


@dataclass(eq=False)
class _Journey:
    """The way of one parameter to its uses, or of one gradient back.

    Attributes:
        start: the call that makes the flat tensor: it reads the parameter, or lays the gradient
            out.
        transfer: the transfer of the flat tensor; None of a parameter that rests on the host as a
            whole.
        end: the call that takes the transferred tensor: it makes the parameter, or adds to the
            gradient.
        function: the function of `end`.
        at: the position of `start` for a parameter, of `end` for a gradient.
        key: journeys with equal keys travel together.
    """

    start: Call
    transfer: Transfer | None
    end: Call
    function: Function
    at: int
    key: Hashable = None

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The transfer, if there is one."""
        return () if self.transfer is None else (self.transfer,)

    @property
    def path(self) -> str:
        return self.function.parameter or ""

    @property
    def sent(self) -> TensorType:
        return _tensor(self.start.result)

    @property
    def received(self) -> TensorType:
        return self.sent if self.transfer is None else _tensor(self.transfer.result)

    @property
    def is_gradient(self) -> bool:
        return self.function.effect is Effect.ACCUMULATE

    @property
    def pieces(self) -> TensorType:
        """The type, sent or received, that has a piece at each rank."""
        return self.received if self.is_gradient else self.sent

    @property
    def along(self) -> tuple[str, ...]:
        """The axes along which pieces are gathered, or reduced to pieces."""
        whole = self.sent if self.is_gradient else self.received
        return tuple(axis for axis in _axes(self.pieces) if axis not in _axes(whole))

    @property
    def members(self) -> int:
        """The number of ranks that have a piece each."""
        assert self.sent.place is not None, "before SCHEDULED a value has a place"
        sizes = dict(self.sent.place.axes)
        return math.prod(sizes[axis] for axis in self.along)

    @property
    def piece_bytes(self) -> int:
        """The bytes of each piece."""
        return _numel_at_rank(self.pieces) * self.pieces.dtype.itemsize


class _Runs:
    """Groups the uses that share one gather or one reduction of a bucket.

    The uses of one task of the schedule are a group. Outside of tasks, a new group begins as soon
    as a parameter is used a second time.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._seen: dict[Hashable, set[str]] = {}

    def of(self, journey: _Journey, bucket: Hashable) -> Hashable:
        """The key of the group that a use of a parameter or gradient belongs to."""
        task = journey.end.task
        if task is not None:
            return task
        seen = self._seen.setdefault((bucket, journey.end.mb), set())
        if journey.path in seen:
            self._numbers[bucket, journey.end.mb] = (
                self._numbers.get((bucket, journey.end.mb), 0) + 1
            )
            seen.clear()
        seen.add(journey.path)
        return journey.end.mb, self._numbers.get((bucket, journey.end.mb), 0)


class _Rewriter:
    """Rewrites one program."""

    def __init__(self, options: Fsdp, module: Module) -> None:
        self._options = options
        self._module = module
        self._names = Names.of(module.program)
        self._renamed: dict[Value, Value] = {}

    def run(self) -> bool:
        program = self._module.program
        journeys = self._journeys(program.ops)
        groups: dict[Hashable, list[_Journey]] = {}
        for journey in journeys:
            groups.setdefault(journey.key, []).append(journey)
        dropped: set[Op] = set()
        for journey in journeys:
            dropped.update((*journey.transfers, journey.end))
            if not journey.is_gradient:
                dropped.add(journey.start)
        inserted: dict[int, list[Op]] = {}
        for group in groups.values():
            if group[0].is_gradient:
                at, new_ops = max(j.at for j in group), list(self._reduce(group, inserted))
            else:
                at, new_ops = min(j.at for j in group), list(self._gather(group))
            inserted.setdefault(at, []).extend(new_ops)
        ops: list[Op] = []
        for index, op in enumerate(program.ops):
            ops += inserted.get(index, ())
            if op not in dropped:
                ops.append(op)
        for op in ops:
            op.operands = tuple([self._renamed.get(value, value) for value in op.operands])
        program.ops[:] = ops
        return bool(journeys)

    # -- what travels ------------------------------------------------------------------------

    def _journeys(self, ops: Sequence[Op]) -> list[_Journey]:
        functions = self._module.functions
        makers: dict[Value, Op] = {value: op for op in ops for value in op.results}
        versions: dict[str | None, int] = {}
        runs = _Runs()
        places = {op: index for index, op in enumerate(ops)}
        journeys: list[_Journey] = []
        for index, op in enumerate(ops):
            if not isinstance(op, Call):
                continue
            function = functions[op.fn.name]
            for state, effect in function.touches:
                if effect.changes_parameters:
                    versions[state] = versions.get(state, 0) + 1
            if function.parameter is None or function.effect is Effect.READ or not op.operands:
                continue
            before = makers.get(op.operands[0])
            transfer = before if isinstance(before, Transfer) else None
            start = before if transfer is None else makers[transfer.operands[0]]
            if transfer is None and not self._reads(start):
                continue
            assert isinstance(start, Call), "a call gives what is handed over"
            journey = _Journey(start, transfer, op, function, index)
            if not journey.is_gradient:
                journey.at = places[start]
            version = sum(versions.get(state, 0) for state, _ in function.touches)
            journey.key = self._key(journey, version, runs)
            journeys.append(journey)
        return journeys

    def _reads(self, op: Op | None) -> bool:
        """True if an op reads a parameter at rest."""
        if not isinstance(op, Call):
            return False
        function = self._module.functions[op.fn.name]
        return function.parameter is not None and function.effect is Effect.READ

    def _key(self, journey: _Journey, version: int, runs: _Runs) -> Hashable:
        function = journey.function
        actor = function.actor or ""
        bucket = bucket_of(journey.path, self._options.bucket)
        field = "reduce" if journey.is_gradient else "regather"
        span: Hashable = None
        if not self._options.keeps(actor, bucket, field):
            span = runs.of(journey, (actor, bucket, version, journey.is_gradient))
        sent, received = journey.sent, journey.received
        sums = _summands(sent), _summands(received)
        return actor, bucket, version, span, journey.is_gradient, sent.dtype, journey.along, sums

    # -- gathers -----------------------------------------------------------------------------

    def _gather(self, group: Sequence[_Journey]) -> Iterator[Op]:
        """The ops that gather parameters, each once."""
        first: dict[str, _Journey] = {}
        for journey in group:
            known = first.setdefault(journey.path, journey)
            if known is not journey:
                self._renamed[journey.end.result] = known.end.result
        chosen = list(first.values())
        spans_step = self._spans_step(group)
        task = None if spans_step else chosen[0].end.task
        mb = None if spans_step else chosen[0].end.mb
        for journey in chosen:
            for op in (journey.start, *journey.transfers, journey.end):
                op.mb = mb
            journey.start.task = journey.end.task = task
        yield from (journey.start for journey in chosen)
        yield from self._travel([(j, j.start.result) for j in chosen], task, Traffic.GATHER)
        yield from (journey.end for journey in chosen)

    def _spans_step(self, group: Sequence[_Journey]) -> bool:
        journey = group[0]
        bucket = bucket_of(journey.path, self._options.bucket)
        field = "reduce" if journey.is_gradient else "regather"
        return self._options.keeps(journey.function.actor or "", bucket, field)

    # -- reductions --------------------------------------------------------------------------

    def _reduce(self, group: Sequence[_Journey], inserted: dict[int, list[Op]]) -> Iterator[Op]:
        """The ops that reduce each gradient once, behind its last term; terms are added up first.

        Args:
            group: the journeys of gradients that travel together.
            inserted: new ops by the position of the op that they precede; the sums are added here.
        """
        last: dict[str, _Journey] = {}
        totals: dict[str, Value] = {}
        for journey in sorted(group, key=lambda j: j.at):
            path, term = journey.path, journey.start.result
            if path in totals:
                add = self._sum(totals[path], term, journey)
                inserted.setdefault(journey.at, []).insert(0, add)
                term = add.result
            totals[path], last[path] = term, journey
        chosen = list(last.values())
        spans_step = self._spans_step(group)
        latest = max(chosen, key=lambda j: j.at)
        task = None if spans_step else latest.end.task
        mb = None if spans_step else latest.end.mb
        for journey in chosen:
            for op in (*journey.transfers, journey.end):
                op.mb = mb
            journey.end.task = task
        pairs = [(journey, totals[journey.path]) for journey in chosen]
        yield from self._travel(pairs, task, Traffic.REDUCE)
        yield from (journey.end for journey in chosen)

    def _sum(self, total: Value, term: Value, journey: _Journey) -> Call:
        function = builtins.add(self._module, journey.sent)
        result = Value(self._names.fresh(f"{term.name}.sum"), term.type)
        end = journey.end
        return Call(
            (total, term),
            (result,),
            fn=Symbol(function.name),
            loc=end.loc,
            mb=end.mb,
            task=end.task,
        )

    # -- both --------------------------------------------------------------------------------

    def _travel(
        self, pairs: Sequence[tuple[_Journey, Value]], task: Task | None, traffic: Traffic
    ) -> Iterator[Op]:
        """The transfers: one for each large tensor, and one for all others together."""
        if any(journey.transfer is None for journey, _ in pairs):
            return  # each comes from the host by itself
        packed = [pair for pair in pairs if pair[0].piece_bytes < LARGE]
        for journey, value in pairs:
            if len(packed) < 2 or (journey, value) not in packed:
                for transfer in journey.transfers:
                    transfer.operands = (value,)
                    transfer.traffic = self._traffic(traffic)
                    yield transfer
        if len(packed) > 1:
            yield from self._packed(packed, task, traffic)

    def _packed(
        self, pairs: Sequence[tuple[_Journey, Value]], task: Task | None, traffic: Traffic
    ) -> Iterator[Op]:
        first = pairs[0][0]
        mb, loc = first.end.mb, first.end.loc
        bucket = bucket_of(first.path, self._options.bucket)
        base = f"{first.function.actor}.{bucket}" if bucket else f"{first.function.actor}"
        sends, comes = ("terms", "reduced") if first.is_gradient else ("pieces", "gathered")
        sent_parts = [journey.sent for journey, _ in pairs]
        received_parts = [journey.received for journey, _ in pairs]
        along = first.along
        place = first.sent.place
        assert place is not None, "before SCHEDULED a value has a place"
        sent = replace(packed(sent_parts, place, along), place=place)
        received = replace(packed(received_parts, place, along), place=place)
        count = first.members
        pieces = (1, count) if traffic is Traffic.GATHER else (count, 1)
        packs = builtins.pack(self._module, sent_parts, sent, pieces[0])
        takes_apart = builtins.unpack(self._module, received, received_parts, pieces[1])
        values = tuple([value for _, value in pairs])
        pack = Call(
            values,
            (Value(self._names.fresh(f"{base}.{sends}"), sent),),
            fn=Symbol(packs.name),
            loc=loc,
            mb=mb,
            task=task,
        )
        moved = Transfer(
            (pack.result,),
            (Value(self._names.fresh(f"{base}.{comes}"), received),),
            traffic=self._traffic(traffic),
            loc=loc,
            mb=mb,
        )
        apart = Call(
            (moved.result,),
            tuple([transfer.result for journey, _ in pairs for transfer in journey.transfers]),
            fn=Symbol(takes_apart.name),
            loc=loc,
            mb=mb,
            task=task,
        )
        yield pack
        yield moved
        yield apart

    def _traffic(self, traffic: Traffic) -> Traffic | None:
        return traffic if self._options.separate else None


def _tensor(value: Value) -> TensorType:
    assert isinstance(value.type, TensorType), "parameters and gradients are tensors"
    return value.type


def _axes(type_: TensorType) -> tuple[str, ...]:
    """The axes that cut a flat tensor."""
    return () if type_.layout is None else type_.layout.cuts[0].axes


def _summands(type_: TensorType) -> tuple[str, ...]:
    return () if type_.layout is None else type_.layout.summands


def _numel_at_rank(type_: TensorType) -> int:
    assert type_.place is not None, "before SCHEDULED a value has a place"
    return numel_at_rank(type_.shape, type_.layout, type_.place)
