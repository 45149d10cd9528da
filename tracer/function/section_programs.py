"""Make the functions that ranks call together: programs of parts and transfers, and bodies."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import fx

from ...ir.attributes import NO_SHARES, Effect, Shares, Symbol, Traffic
from ...ir.flops import NO_FLOPS, Flops
from ...ir.location import Location
from ...ir.ops import Call as CallOp
from ...ir.ops import Return, Value
from ...ir.ops import Transfer as TransferOp
from ...ir.ops.module import Function, FunctionKind, Program
from ...ir.ops.names import Names
from ...ir.types import DType, TensorType, UnitType, ValueType
from ..graph.autodiff.subgraphs import (
    PieceNodes,
    Subgraph,
    SubgraphBuilder,
    fake_of,
    gradients_of,
    has_checks,
    is_dense,
    results,
)
from ..graph.codegen.codegen import make_body, sources_of
from ..graph.codegen.generated_source import BodySources
from ..graph.codegen.workspace import workspace_of
from ..graph.layouts.cases import LayoutError
from ..graph.layouts.cuts import unmerged
from ..graph.layouts.propagation.partition import Part, Partition
from ..graph.layouts.propagation.sections import LaidOutSection
from ..graph.layouts.versions import LayoutTransfer, Version, text_of
from ..lazy import Lazy
from ..method.node_memory import memory_of
from ..method.purity.flops import count_flops
from ..values.actor_state import StateTensor
from ..values.gradient_buckets import buckets_of
from ..values.interface import Body, RankBodies, TracedPart
from ..values.operators import is_random
from ..values.specs import ir_dtype
from .float8_weights import Float8Weights
from .groups.stored import GradientReduction, ParameterGather, Stored

Gradients: TypeAlias = Sequence[tuple[StateTensor, Version]]


@dataclass(frozen=True)
class SectionProgram:
    """Makes the function of one section, whose body is a program.

    Attributes:
        name: the function's name.
        actor: the name of the function's actor; None for a torch function.
        section: the section that the function computes.
        state: the tensors of each rank that has a graph. The first rank's operations are counted.
        played: the ranks of `state` that this process plays.
        owner: the module that holds the constants that graphs refer to.
        effect, shares: the effects of the function, and of its parts that use state.
        loc: the user's line.
        stored: the actor's stored parameters; None without an actor.
        float8: the actor's weights that are prepared for float8; None without an actor.
        buckets: the buckets of the gradients that are reduced, by path.
    """

    name: str
    actor: str | None
    section: LaidOutSection
    state: Mapping[int, Sequence[StateTensor]]
    played: tuple[int, ...]
    owner: torch.nn.Module
    effect: Effect
    shares: Shares
    loc: Location | None
    stored: Stored | None
    float8: Float8Weights | None
    buckets: Mapping[str, int]

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
            inputs=tuple(map(_type, self.section.takes)),
            outputs=tuple(map(_type, self.section.gives)) or (UnitType(),),
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

    def _plans(self, reductions: Collection[LayoutTransfer]) -> Iterator[_PartPlan]:
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
            yield _PartPlan(part, returned, gradients)
        parts = section.partition.parts
        is_idle = not (section.gives or section.gradients or any(part.nodes for part in parts))
        # A last part adds the gradients that no part computes: exchanged ones, or inputs. A section
        # without any work also needs a part.
        if pending or is_idle:
            yield _PartPlan(None, (), pending)

    def _part(self, index: int, plan: _PartPlan) -> TracedPart:
        bodies: dict[int, Body] = {}
        name = f"{self.name}.part{index}"
        pieces: dict[int, tuple[Subgraph, BodySources]] = {}
        for rank, own in self.state.items():
            which = plan.graph_of(rank)
            if which not in pieces:
                piece = plan.piece(rank, self.section.in_place, self.owner)
                pieces[which] = piece, sources_of(piece)
            if rank in self.played:
                piece, sources = pieces[which]
                bodies[rank] = make_body(piece.on_tensors(own), name, sources)
        first, _ = next(iter(pieces.values()))
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
            flops=count_flops(first.graph),
            workspace=workspace_of(first),
            buckets=buckets_of((t.path for t, _ in plan.gradients), self.buckets),
        )
        return TracedPart(function, RankBodies.of(bodies) if bodies else None)

    def _program(
        self,
        writer: _SectionWriter,
        plans: Sequence[_PartPlan],
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
                    writer.gather(gather, transfer.after, writer.maxima(self.float8))
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


@dataclass(frozen=True)
class _PartPlan:
    """A part, the versions that it returns, and the gradients that it accumulates.

    Without a part (None), the function computes nothing: it only accumulates gradients, if any.
    """

    part: Part | None
    returned: tuple[Version, ...]
    gradients: Gradients

    @property
    def is_needed(self) -> bool:
        return self.part is None or bool(self.returned or self.gradients or self.part.nodes)

    @property
    def versions(self) -> tuple[Version, ...]:
        """The inputs of the part's graph, in the graph's order."""
        if self.part is not None:
            return self.part.inputs
        return tuple(dict.fromkeys(version for _, version in self.gradients))

    def inputs(self, state: Collection[Version]) -> tuple[Version, ...]:
        """The inputs that are arguments of the part's function."""
        return tuple(version for version in self.versions if version not in state)

    def reads(self, state: Collection[Version]) -> tuple[Version, ...]:
        """The inputs that are state of the actor."""
        return tuple(version for version in self.versions if version in state)

    def graph_of(self, rank: int) -> int:
        """The index of a rank's graph; ranks of one index run the same piece."""
        return 0 if self.part is None else self.part.bodies.of_rank[rank]

    def piece(
        self, rank: int, state: Mapping[Version, StateTensor], owner: torch.nn.Module
    ) -> Subgraph:
        """The piece that a rank runs; its tensors are those of the first rank.

        Args:
            rank: the rank.
            state: the tensors of the state, by version.
            owner: the module that holds the constants that graphs refer to.
        """
        reads, inputs = self.reads(state), self.inputs(state)
        if self.part is not None:
            graph = self.part.bodies.at(rank)
            placeholders = graph.find_nodes(op="placeholder")
            node_of = dict(zip(self.versions, placeholders, strict=True))
            output_of = dict(zip(self.part.outputs, results(graph), strict=True))
            nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        else:
            node_of = output_of = {version: version.node for version in inputs}
            nodes = []
        taken = [node_of[version] for version in (*reads, *inputs)]
        returned = [output_of[version] for version in self.returned]
        graded = [(tensor, output_of[version]) for tensor, version in self.gradients]
        builder = SubgraphBuilder({n.name: n.meta["loc"] for n in nodes if "loc" in n.meta})
        for node in taken:
            builder.placeholder(node)
        for node in nodes:
            builder.copy(node)
        memory = {memory_of(node) for node in taken}
        values = _apart(builder, returned, memory)
        builder.graph.output((*values, *(builder.of(node) for _, node in graded)))
        return Subgraph(
            nodes=Lazy.known(PieceNodes(builder.graph, owner, builder.locations)),
            reads=tuple(state[version] for version in reads),
            takes=tuple(map(_type, inputs)),
            dense=(True,) * len(inputs),
            gives=tuple(map(_type, self.returned)),
            rebinds=(),
            gradients=gradients_of(graded, returned, memory),
            aliases=(),
            draws=any(is_random(node.target, node.args, node.kwargs) for node in nodes),
            checks=has_checks(builder.graph),
        )


def _apart(
    builder: SubgraphBuilder, returned: Sequence[fx.Node], memory: Collection[int | None]
) -> Iterator[fx.Node]:
    """Values that are returned: contiguous, in memory of their own.

    Args:
        builder: has copied the values.
        returned: the values.
        memory: memory of what the piece takes.
    """
    used = set(memory)
    for node in returned:
        if is_dense(node) and node.op == "call_function" and memory_of(node) not in used:
            used.add(memory_of(node))
            yield builder.of(node)
        else:
            yield builder.clone(node, dense=True)


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
        self._maxima: Value | None = None
        self._ops: list[CallOp | TransferOp | Return] = []

    def _value(self, version: Version) -> Value:
        return Value(self._names.fresh(version.node.name), _type(version))

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
        if _type(before).shape != _type(after).shape:
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

    def maxima(self, weights: Float8Weights) -> Value:
        """The greatest magnitudes of an actor's weights, which ranks reduce once."""
        if self._maxima is None:
            terms, type_ = self._hand(weights.maxima(), (), "maxima.terms"), weights.reduced
            self._maxima = terms if terms.type == type_ else self._moved(terms, type_, "maxima")
        return self._maxima

    def prepare(
        self, version: Version, weights: Float8Weights, sources: Sequence[StateTensor]
    ) -> None:
        """Make a version: the greatest magnitudes of an actor's weights, or the cast of one."""
        value = self.maxima(weights)
        if len(sources) == 1:
            value = self._hand(weights.casts(sources[0].path), (value,), version.node.name)
        self._values[version] = value

    def gather(
        self, gather: ParameterGather, version: Version, maxima: Value | None = None
    ) -> None:
        """Gather or fetch a stored parameter; as float8 if there are magnitudes."""
        base = version.node.name
        takes = () if maxima is None else (maxima,)
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


def _type(version: Version) -> TensorType:
    """The type of a version, without a place. A product of cut factors has a dimension for each."""
    fake = fake_of(version.node)
    layout, shape = unmerged(version.layout, tuple(fake.shape))
    return TensorType(ir_dtype(fake.dtype), shape, None, layout if layout.axes else None)
