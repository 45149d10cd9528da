"""Check that slices of summands go only into reductions.

A slice of summands is one term of a sum, though its type does not say so. So this check follows the
terms of each value through the program: messages and concatenations keep them, and reductions and
additions unite them. A value with all terms is an ordinary value. A value that lacks terms may go
into no other op, so a program that leaves out a reduction is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..attributes import ReduceOp
from ..layout import Layout, Region, format_region, logical, shape_of, share, union, volume
from ..ops import (
    AllGather,
    Assemble,
    Broadcast,
    Call,
    Collective,
    Constant,
    Copy,
    Op,
    Recv,
    Send,
    Slice,
    Transfer,
    Value,
    Wait,
)
from ..ops.builtins import reduction
from ..ops.module import Function, Program
from ..ops.rules import Problem
from ..text.diagnostics import Diagnostic
from ..types import Place, TensorType

_KEEPING = (Broadcast, Copy, Transfer, Wait)
"""The ops whose results have the terms of their operand."""

_NEUTRAL = {ReduceOp.SUM: 0, ReduceOp.PROD: 1}
"""The neutral element of each reduction. Of a maximum or minimum, copies change nothing."""

_HELP = (
    "reduce it first: all_reduce, reduce_scatter or an addition takes the slices of one region, "
    "one for each rank along the axes of the summands"
)

_Term = tuple[int, ...]
"""Coordinates along the axes of summands; ranks with equal coordinates hold the same summand."""


@dataclass(frozen=True)
class _RegionTerms:
    """Some terms of a region of a value that is held as summands.

    Attributes:
        source: the value.
        region: the region, in indices of the logical value.
        terms: the terms that are combined in the part.
    """

    source: Value
    region: Region
    terms: frozenset[_Term]

    @property
    def layout(self) -> Layout:
        layout = _layout(self.source)
        assert layout is not None, "summands are laid out"
        return layout

    @property
    def all_terms(self) -> frozenset[_Term]:
        """The terms of all ranks."""
        sizes = dict(_place(self.source).axes)
        along = (range(sizes[axis]) for axis in self.layout.summands)
        return frozenset(itertools.product(*along))

    @property
    def count(self) -> int:
        """The number of all terms."""
        sizes = dict(_place(self.source).axes)
        return math.prod(sizes[axis] for axis in self.layout.summands)

    def at(self, region: Region) -> _RegionTerms:
        """The same terms of another region."""
        return replace(self, region=region)

    def __str__(self) -> str:
        where = f"{format_region(self.region)} of %{self.source.name}"
        return f"{len(self.terms)} of the {self.count} summands of {where}"


def check_summands(program: Program, functions: Mapping[str, Function]) -> Iterator[Diagnostic]:
    """The problems with summands in a program over all ranks whose types fit.

    Args:
        program: a placed or asynchronous program. A traced one has no slices of summands.
        functions: the functions of its module.
    """
    checker = _SummandChecker(functions)
    for op in program.ops:
        try:
            checker.visit(op)
        except Problem as problem:
            yield Diagnostic(problem.message, op, program, problem.value, problem.help)


def _place(value: Value) -> Place:
    assert value.type.place is not None, "before SCHEDULED a value has a place"
    return value.type.place


def _layout(value: Value) -> Layout | None:
    return value.type.layout if isinstance(value.type, TensorType) else None


class _SummandChecker:
    """Tracks the terms of values; a value that it does not know has all terms."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self._functions = functions
        self._parts: dict[Value, _RegionTerms] = {}
        self._sent: dict[tuple[int, int], _RegionTerms] = {}
        self._fills: dict[Value, float] = {}

    def visit(self, op: Op) -> None:
        """Follow the terms of an op's operands to its results.

        Raises:
            Problem: the op does not take these terms.
        """
        if isinstance(op, Slice):
            self._slice(op)
        elif isinstance(op, Recv):
            if part := self._sent.get((op.chan, op.seq)):
                self._parts[op.result] = part
        elif isinstance(op, Assemble):
            self._assemble(op)
        elif isinstance(op, Constant):
            if op.fill is not None:
                self._fills[op.result] = op.fill
        elif any(value in self._parts for value in op.operands):
            self._take(op)

    def _take(self, op: Op) -> None:
        first = next(value for value in op.operands if value in self._parts)
        part = self._parts[first]
        if isinstance(op, _KEEPING):
            if any(_layout(result) is not None for result in op.results):
                raise self._unreduced(op, first)
            self._parts.update(dict.fromkeys(op.results, part))
        elif isinstance(op, Send):
            self._sent[op.chan, op.seq] = part
        elif isinstance(op, AllGather):
            self._gather(op, self._alike(op, op.operands))
        elif self._reduces(op, part.layout.reduce):
            self._reduce(op, first)
        else:
            raise self._unreduced(op, first)

    def _reduces(self, op: Op, reduce: ReduceOp) -> bool:
        """True if an op combines its operands by the operation `reduce`."""
        if isinstance(op, Call):
            return reduction(self._functions[op.fn.name]) is reduce
        return isinstance(op, Collective) and op.exchange.reduce is reduce

    def _slice(self, op: Slice) -> None:
        (value,) = op.operands
        layout = _layout(value)
        if layout is not None and layout.summands:
            term = _term(value, layout.summands, _place(op.result).rank)
            self._note(op.result, _RegionTerms(value, op.region, frozenset({term})))
        elif part := self._parts.get(value):
            self._note(op.result, part.at(logical(op.region, part.region)))

    def _reduce(self, op: Op, first: Value) -> None:
        """Unite the terms of the operands, which have one region."""
        part = self._parts[first]
        terms: set[_Term] = set()
        for value in op.tensors if isinstance(op, Collective) else op.operands:
            summand = self._parts.get(value)
            if summand is None or (summand.source, summand.region) != (part.source, part.region):
                raise self._unlike(op, first, value)
            if not terms.isdisjoint(summand.terms):
                source = part.source.name
                raise Problem(f"{op.opcode} takes a summand of %{source} twice", _HELP, value)
            terms |= summand.terms
        united = replace(part, terms=frozenset(terms))
        for index, value in enumerate(op.results):
            region = part.region
            if isinstance(op, Collective) and op.exchange.cut is not None:
                region = share(region, index, len(op.exchange.members), op.exchange.cut)
            self._note(value, united.at(region))

    def _gather(self, op: AllGather, parts: Sequence[_RegionTerms]) -> None:
        """Concatenate regions with the same terms."""
        region = union(part.region for part in parts)
        for index, (value, part) in enumerate(zip(op.operands, parts, strict=True)):
            if part.region != share(region, index, len(parts), op.dim):
                raise Problem(
                    f"all_gather of %{value.name}, {part}, which is not part {index} of "
                    f"{len(parts)} of {format_region(region)}",
                    "gather equal parts in the order of their indices",
                    value,
                )
        self._note(op.result, parts[0].at(region))

    def _alike(self, op: Op, values: Sequence[Value]) -> list[_RegionTerms]:
        """The parts of values, which must have the same terms."""
        first = next(value for value in values if value in self._parts)
        part = self._parts[first]
        for value in values:
            summand = self._parts.get(value)
            if summand is None or (summand.source, summand.terms) != (part.source, part.terms):
                raise self._unlike(op, first, value)
        return [self._parts[value] for value in values]

    def _note(self, value: Value, part: _RegionTerms) -> None:
        if len(part.terms) < part.count:
            self._parts[value] = part

    def _unreduced(self, op: Op, value: Value) -> Problem:
        return Problem(
            f"{op.opcode} of %{value.name}, which is {self._parts[value]} alone", _HELP, value
        )

    def _unlike(self, op: Op, one: Value, other: Value) -> Problem:
        description = self._parts.get(other, "which is no summand")
        return Problem(
            f"{op.opcode} of %{one.name}, {self._parts[one]}, and of %{other.name}, {description}",
            _HELP,
            other,
        )

    def _assemble(self, op: Assemble) -> None:
        layout = _layout(op.result)
        taken = [value for value in op.operands if value in self._parts]
        if layout is not None and layout.summands:
            self._make_summands(op, layout, taken)
        elif taken and layout is not None:
            raise self._unreduced(op, taken[0])
        elif taken:
            parts = self._alike(op, op.operands)
            assembled = parts[0].at(union(part.region for part in parts))
            for value, part, region in zip(op.operands, parts, op.regions, strict=True):
                self._expect_region(op, value, logical(region, assembled.region), part)
            if shape_of(assembled.region) != _shape(op.result):
                raise self._unreduced(op, taken[0])
            self._note(op.result, assembled)

    def _expect_region(self, op: Op, value: Value, region: Region, part: _RegionTerms) -> None:
        if part.region != region:
            raise Problem(
                f"{op.opcode} takes %{value.name}, {part}, as {format_region(region)}",
                "a part of summands stays at its indices",
                value,
            )

    def _make_summands(self, op: Assemble, layout: Layout, taken: Sequence[Value]) -> None:
        """Check that the ranks along the axes of summands have each term once."""
        everything: frozenset[_Term] = frozenset({()})
        if taken:
            part = self._parts[taken[0]]
            everything = part.all_terms
            if part.layout.reduce is not layout.reduce:
                raise self._unreduced(op, taken[0])
            for value in taken:
                if self._parts[value].source is not part.source:
                    raise self._unlike(op, taken[0], value)
        elif layout.reduce not in _NEUTRAL:
            return  # copies, which a maximum or minimum may take as summands
        terms_of: dict[tuple[object, ...], list[frozenset[_Term]]] = {}
        place = _place(op.result)
        fixed = tuple(axis for axis, _ in place.axes if axis not in layout.summands)
        for rank, parts in op.by_rank().items():
            if not parts:
                continue
            held = self._held(op, parts, _NEUTRAL.get(layout.reduce), everything)
            terms_of.setdefault(_term(op.result, fixed, rank), []).append(held)
        for terms in terms_of.values():
            twice = layout.reduce in _NEUTRAL and sum(map(len, terms)) > len(everything)
            if twice or frozenset().union(*terms) != everything:
                raise Problem(
                    f"the ranks along {'.'.join(layout.summands)} do not have each summand of "
                    f"%{op.result.name} once",
                    "of summands each rank keeps its own; of copies the first rank does, and the "
                    f"others have constant() {{fill = {_NEUTRAL.get(layout.reduce, 0)}}}",
                    op.result,
                )

    def _held(
        self,
        op: Assemble,
        operands: Sequence[tuple[Value, Region]],
        neutral: int | None,
        everything: frozenset[_Term],
    ) -> frozenset[_Term]:
        """The terms that a rank has of an assembled value, from the rank's operands."""
        filled = [(value, region) for value, region in operands if volume(region)]
        if neutral is not None and all(self._fills.get(value) == neutral for value, _ in filled):
            return frozenset()
        if not any(value in self._parts for value, _ in filled):
            return everything
        parts = self._alike(op, [value for value, _ in filled])
        for (value, region), part in zip(filled, parts, strict=True):
            self._expect_region(op, value, region, part)
        return parts[0].terms


def _term(value: Value, axes: Iterable[str], rank: int) -> _Term:
    position = _place(value).position(rank)
    return tuple(position[axis][0] for axis in axes)


def _shape(value: Value) -> tuple[int, ...]:
    assert isinstance(value.type, TensorType), "an assemble makes a tensor"
    return value.type.shape
