"""Make the functions that ranks call together: programs of parts and transfers, and bodies."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...ir.attributes import NO_SHARES, Effect, Shares, Symbol, Traffic
from ...ir.flops import NO_FLOPS, Flops
from ...ir.location import Location
from ...ir.ops import Call as CallOp
from ...ir.ops import Return, Value
from ...ir.ops import Transfer as TransferOp
from ...ir.ops.module import Function, FunctionKind, Program
from ...ir.ops.names import Names
from ...ir.types import DType, UnitType, ValueType
from ..graph.codegen.codegen import make_body
from ..graph.layouts.cases import LayoutError
from ..graph.layouts.propagation.partition import Partition
from ..graph.layouts.propagation.sections import LaidOutSection
from ..graph.layouts.versions import LayoutTransfer, Version, text_of
from ..method.joint_graph import Joint
from ..values.actor_state import StateTensor
from ..values.gradient_buckets import buckets_of
from ..values.interface import Body, RankBodies, TracedPart
from .float8_weights import Float8Weights
from .groups.stored import GradientReduction, ParameterGather, Stored
from .laid_out_pieces import LaidOutPieces
from .part_plans import PartPlan, type_of_version


@dataclass(frozen=True)
class SectionProgram:
    """Makes the function of one section, whose body is a program.

    Attributes:
        name: the function's name.
        actor: the name of the function's actor; None for a torch function.
        section: the section that the function computes.
        state: the tensors of each rank that has a graph. The first rank's operations are counted.
        played: the ranks of `state` that this process plays.
        joint: the joint graph of the section.
        effect, shares: the effects of the function, and of its parts that use state.
        loc: the user's line.
        stored: the actor's stored parameters; None without an actor.
        float8: the actor's weights that are prepared for float8; None without an actor.
        buckets: the buckets of the gradients that are reduced, by path.
        pieces: the pieces of the step's graphs.
    """

    name: str
    actor: str | None
    section: LaidOutSection
    state: Mapping[int, Sequence[StateTensor]]
    played: tuple[int, ...]
    joint: Joint
    effect: Effect
    shares: Shares
    loc: Location | None
    stored: Stored | None
    float8: Float8Weights | None
    buckets: Mapping[str, int]
    pieces: LaidOutPieces

    def make(self) -> TracedPart:
        """Make the function."""
        reductions = self._reductions()
        plans = list(self._plans(reductions))
        plan_parts = [self._part(i, p) if p.is_needed else None for i, p in enumerate(plans)]
        writer = _SectionWriter(self.section.takes, self.loc)
        program = self._program(writer, plans, plan_parts, reductions)
        parts = (*(part for part in plan_parts if part is not None), *writer.called.values())
        functions = [part.declaration for part in parts]
        declaration = Function(
            self.name,
            inputs=tuple(map(type_of_version, self.section.takes)),
            outputs=tuple(map(type_of_version, self.section.gives)) or (UnitType(),),
            kind=FunctionKind.PROGRAM,
            effect=self.effect,
            shares=self.shares,
            actor=self.actor,
            random=any(function.random for function in functions),
            checks=any(function.checks for function in functions),
            loc=self.loc,
            flops=functools.reduce(_total, (function.flops for function in functions), NO_FLOPS),
        )
        return TracedPart(declaration, None, program, parts)

    def _reductions(self) -> dict[LayoutTransfer, GradientReduction]:
        """The reductions of gradients to the pieces that ranks store, by transfer."""
        reduction_of: dict[LayoutTransfer, GradientReduction] = {}
        paths = {version: t.path for t, version in self.section.gradients}
        read = {v for part in self.section.partition.parts for v in part.inputs}
        for transfer in _transfers(self.section.partition):
            path = paths.get(transfer.after)
            if self.stored is None or path is None or path not in self.stored:
                continue
            if transfer.after in read:
                continue
            before, after = transfer.before.layout, transfer.after.layout
            if (reduction := self.stored.reduces(path, before, after)) is not None:
                reduction_of[transfer] = reduction
        return reduction_of

    def _plans(self, reductions: Collection[LayoutTransfer]) -> Iterator[PartPlan]:
        """The plan of each part: which values it returns, which gradients it accumulates."""
        section = self.section
        reduced = {transfer.after for transfer in reductions}
        pending = [pair for pair in section.gradients if pair[1] not in reduced]
        used = set(section.gives) | {v for t in _transfers(section.partition) for v in t.takes}
        used |= {v for part in section.partition.parts for v in part.inputs}
        for part, _ in section.partition.steps:
            gradients = [pair for pair in pending if pair[1] in part.outputs]
            pending = [pair for pair in pending if pair not in gradients]
            returned = tuple(version for version in part.outputs if version in used)
            yield PartPlan(part, returned, gradients)
        parts = section.partition.parts
        is_idle = not (section.gives or section.gradients or any(part.nodes for part in parts))
        # A last part adds the gradients that no part computes: exchanged ones, or inputs. A section
        # without any work also needs a part.
        if pending or is_idle:
            yield PartPlan(None, (), pending)

    def _part(self, index: int, plan: PartPlan) -> TracedPart:
        bodies: dict[int, Body] = {}
        name = f"{self.name}.part{index}"
        for rank, own in self.state.items():
            if rank in self.played:
                piece, facts = self.pieces.part(self.section, index, plan, rank, self.joint)
                bodies[rank] = make_body(piece.on_tensors(own), name, facts.sources)
        rank = next(iter(self.state))
        first, facts = self.pieces.part(self.section, index, plan, rank, self.joint)
        touches = plan.gradients or plan.reads(self.section.in_place)
        function = Function(
            name,
            inputs=first.takes,
            outputs=first.gives or (UnitType(),),
            effect=self.effect if touches else Effect.PURE,
            shares=self.shares if touches else NO_SHARES,
            actor=self.actor,
            random=first.draws,
            checks=first.checks,
            loc=self.loc,
            flops=facts.flops.value,
            workspace=facts.workspace.value,
            buckets=buckets_of((t.path for t, _ in plan.gradients), self.buckets),
        )
        return TracedPart(function, RankBodies.of(bodies) if bodies else None)

    def _program(
        self,
        writer: _SectionWriter,
        plans: Sequence[PartPlan],
        parts: Sequence[TracedPart | None],
        reductions: Mapping[LayoutTransfer, GradientReduction],
    ) -> Program:
        partition, in_place = self.section.partition, self.section.in_place
        for index, (plan, part) in enumerate(zip(plans, parts, strict=True)):
            for transfer in partition.gathers.get(index, ()):
                assert self.stored is not None, "an actor stores what is gathered"
                tensor = self.section.state[transfer.before]
                if tensor.sources:
                    assert self.float8 is not None, "a plan says what is cast"
                    (source,) = tensor.sources
                    gather = self.float8.gathers(source.path)
                    writer.gather(gather, transfer.after, writer.scales(self.float8))
                else:
                    writer.gather(self.stored.gathers(tensor.path), transfer.after)
            if part is not None:
                inputs = plan.inputs(in_place)
                for version in inputs:
                    self._prepare(writer, version)
                writer.call(part.declaration, inputs, plan.returned)
            for transfer in partition.steps[index][1] if index < len(partition.steps) else ():
                if transfer in reductions:
                    writer.reduce(reductions[transfer], transfer.before)
                else:
                    writer.transfer(transfer)
        for version in self.section.gives:
            self._prepare(writer, version)
        return writer.end(self.name, self.section.gives)

    def _prepare(self, writer: _SectionWriter, version: Version) -> None:
        """Compute or fetch a version of state that parts do not read where it lives."""
        tensor = self.section.state.get(version)
        if tensor is None or writer.has(version):
            return
        if tensor.sources:
            assert self.float8 is not None, "a plan says what is cast"
            writer.prepare(version, self.float8, tensor.sources)
        elif tensor.path in self.section.resting:
            assert self.stored is not None, "an actor has what rests"
            writer.gather(self.stored.gathers(tensor.path), version)


class _SectionWriter:
    """Writes the program of a function.

    Attributes:
        called: the functions that hand parameters and gradients over, by name.
    """

    def __init__(self, takes: Sequence[Version], loc: Location | None) -> None:
        self.called: dict[str, TracedPart] = {}
        self._names = Names()
        self._loc = loc
        self._params = [self._value(version) for version in takes]
        self._values = dict(zip(takes, self._params, strict=True))
        self._done: Value | None = None
        self._scales: Value | None = None
        self._ops: list[CallOp | TransferOp | Return] = []

    def _value(self, version: Version) -> Value:
        return Value(self._names.fresh(version.node.name), type_of_version(version))

    def call(self, function: Function, takes: Iterable[Version], gives: Sequence[Version]) -> None:
        results = tuple(self._value(version) for version in gives)
        if not results:
            self._done = Value(self._names.fresh("done"), UnitType())
            results = (self._done,)
        operands = tuple([self._values[version] for version in takes])
        key = 0 if function.random else None
        call = CallOp(operands, results, fn=Symbol(function.name), key=key, loc=self._loc)
        self._ops.append(call)
        self._values.update(zip(gives, results, strict=False))

    def transfer(self, transfer: LayoutTransfer) -> None:
        before, after, rows = transfer.before, transfer.after, transfer.rows
        result = self._values[after] = self._value(after)
        if type_of_version(before).shape != type_of_version(after).shape:
            raise LayoutError(
                f"{text_of(before)} is exchanged to be {text_of(after)}, and a dimension of it is "
                "cut as two factors of it are, which no type says",
                loc=self._loc,
                remedy="keep the factors apart where ranks exchange something: do not view two cut "
                "dimensions as one",
            )
        operands = tuple([self._values[version] for version in transfer.takes])
        op = TransferOp(operands, (result,), loc=self._loc)
        if rows is not None:
            op.experts, op.lead = rows.experts, rows.lead
        op.form = transfer.why or None
        if any(cut.shift for version in (before, after) for cut in version.layout.cuts):
            op.traffic = Traffic.RING
        self._ops.append(op)

    def has(self, version: Version) -> bool:
        """True if there is a value of a version."""
        return version in self._values

    def scales(self, weights: Float8Weights) -> Value:
        """The scales of an actor's weights, whose greatest magnitudes ranks reduce once."""
        if self._scales is None:
            scales = weights.scales()
            terms = self._hand(weights.maxima(), (), "maxima.terms")
            maxima = self._travel(terms, scales, "maxima")
            self._scales = self._hand(scales, (maxima,), "scales")
        return self._scales

    def prepare(
        self, version: Version, weights: Float8Weights, sources: Sequence[StateTensor]
    ) -> None:
        """Make a version: the scales of an actor's weights, or the cast of one."""
        value = self.scales(weights)
        if len(sources) == 1:
            value = self._hand(weights.casts(sources[0].path), (value,), version.node.name)
        self._values[version] = value

    def gather(
        self, gather: ParameterGather, version: Version, scales: Value | None = None
    ) -> None:
        """Gather or fetch a stored parameter; as float8 if there are scales."""
        base = version.node.name
        takes = () if scales is None else (scales,)
        rest = self._hand(gather.read, takes, f"{base}.rest")
        full = self._travel(rest, gather.make, f"{base}.full")
        self._values[version] = self._hand(gather.make, (full,), base)

    def reduce(self, reduce: GradientReduction, version: Version) -> None:
        """Reduce a gradient to the pieces that ranks store, and add these to `.grad`."""
        base = version.node.name
        terms = self._hand(reduce.lay, (self._values[version],), f"{base}.terms")
        total = self._travel(terms, reduce.add, f"{base}.total")
        self._done = self._hand(reduce.add, (total,), "done")

    def _hand(self, part: TracedPart, operands: tuple[Value, ...], name: str) -> Value:
        function = part.declaration
        self.called[function.name] = part
        (type_,) = function.outputs
        result = Value(self._names.fresh(name), type_)
        self._ops.append(CallOp(operands, (result,), fn=Symbol(function.name), loc=self._loc))
        return result

    def _travel(self, value: Value, to: TracedPart, name: str) -> Value:
        """Transfer a value to the layout in which a function takes it, if it has another."""
        (type_,) = to.declaration.inputs
        return value if value.type == type_ else self._moved(value, type_, name)

    def _moved(self, value: Value, type_: ValueType, name: str) -> Value:
        result = Value(self._names.fresh(name), type_)
        self._ops.append(TransferOp((value,), (result,), loc=self._loc))
        return result

    def end(self, name: str, gives: Sequence[Version]) -> Program:
        """End the program. Without results it returns a unit."""
        values = tuple([self._values[version] for version in gives])
        if not values:
            assert self._done is not None, "a function that gives nothing calls another that does"
            values = (self._done,)
        self._ops.append(Return(values, ()))
        return Program(name, list(self._params), list(self._ops))


def _total(one: Flops, other: Flops) -> Flops:
    counts: Counter[DType] = Counter(dict(one.counts))
    counts.update(dict(other.counts))
    return Flops.of(counts)


def _transfers(partition: Partition) -> Iterator[LayoutTransfer]:
    for _, transfers in partition.steps:
        yield from transfers
