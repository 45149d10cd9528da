"""Collectives: ops in which all ranks of a group take part.

Each class declares its `Exchange`: which ranks give a tensor, how the tensors are cut and combined,
and which ranks get the outcome. Types, places, projection, derivatives, the virtual world and the
transports of hosts follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ..attributes import COMMUNICATION_STREAMS, ReduceOp, Stream, Traffic
from ..layout import Region
from ..phases import Phase, has_futures
from ..types import Place, Type, UnitType
from .base import Adjoint, Op, Value
from .rules import (
    CheckContext,
    Problem,
    bare,
    check_ranks,
    expect_future,
    expect_operands,
    expect_results,
    expect_tensor,
    expect_type,
    resized,
    same_but_place,
)


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """The rows of a collective's tensors that travel: those that ids send to a member's experts.

    The leading dimensions of a whole tensor are rows, and so many entries of the ids belong to a
    row as there are ids for each. A row is a member's if one of its ids is of the member's experts.

    Attributes:
        lead: the number of dimensions that rows stand along.
        experts: for each member the indices of its experts, a region of one dimension.
    """

    lead: int
    experts: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """The meaning of a collective, in terms of ranks.

    Each receiver gets a piece from each sender: the whole operand or, with `cut`, the part with the
    receiver's number in the group. It combines the pieces in the order of the group. Members that
    receive nothing get a unit.

    The verifier and the ports of hosts derive the types of messages from four rules, which
    `problem` checks: pieces of several senders are cut or combined; every member gives or receives;
    at least one member receives; if some members only give and others only receive, operands are
    neither cut nor concatenated. A barrier is exempt from these rules.

    Attributes:
        members: the ranks of the group, in order.
        senders: the members that give an operand, in group order.
        receivers: the members that get a value, in group order.
        cut: the dimension along which operands are cut into a part for each member; None: whole.
        reduce: the operation that combines pieces elementwise, if any.
        concat: the dimension along which pieces are concatenated, if any.
        routed: the rows that travel, if not all do. Rows are cut or concatenated along their first
            dimension. Of concatenated ones a receiver gets its own, and zeros for the others; of
            combined ones a sender gives its own alone, and the others count as zeros.
    """

    members: tuple[int, ...]
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    cut: int | None = None
    reduce: ReduceOp | None = None
    concat: int | None = None
    routed: RoutedRows | None = None

    @property
    def problem(self) -> Problem | None:
        """The rule that it breaks, if any."""
        if len(self.senders) > 1 and self.receivers and self.is_whole:
            return Problem(
                f"receivers get {len(self.senders)} tensors each, and nothing combines them",
                "reduce, concatenate or cut them",
            )
        if self.receivers == self.members or not (self.senders or self.receivers):
            return None
        idle = set(self.members).difference(self.senders, self.receivers)
        if idle:
            ranks = sorted(idle)
            return Problem(f"ranks {ranks} neither give nor receive", "leave them out of the group")
        if not self.receivers:
            return Problem("nobody receives", "leave the op out, or let a rank receive")
        if self.senders != self.members and (self.cut, self.concat) != (None, None):
            return Problem("some ranks give, others receive parts", "let all give, or all receive")
        return None

    @property
    def has_one_result_type(self) -> bool:
        """True if all members get results of one type."""
        return self.receivers in ((), self.members)

    @property
    def is_shared(self) -> bool:
        """True if all members get the same value."""
        return self.cut is None and self.routed is None and self.has_one_result_type

    @property
    def is_whole(self) -> bool:
        """True if receivers get a sender's operand as it is, neither cut nor combined."""
        return self.cut is None and self.reduce is None and self.concat is None

    @property
    def rounds(self) -> int:
        """How often bytes travel: twice if parts are reduced and then exchanged, else once."""
        return 2 if self.reduce is not None and self.is_shared else 1


@dataclass(eq=False, slots=True)
class Collective(Op):
    """An op in which all ranks of a group take part, in one order.

    In a program over all ranks there is one operand for each rank of the group, in group order;
    `broadcast` and `scatter` take the root's operand alone, `barrier` takes none. There is one
    result at the whole group. Where the exchange is not shared, ranks get different values, and
    there is one result for each rank, in group order. A rank's program has only the operand and the
    result of that rank. From ASYNC on results are futures, and `chan` and `seq` are set, as in
    `send`. `traffic`, `via` and `why` are as in `transfer`.
    """

    brings_operands: ClassVar[bool] = True
    streams: ClassVar[frozenset[Stream]] = COMMUNICATION_STREAMS
    # The operands that it takes, in words, for errors, and how many of each sender.
    operand_rule: ClassVar[str] = "one operand for each rank of the program"
    operands_each: ClassVar[int] = 1
    group: Place = field(default=Place((0,)), kw_only=True)
    chan: int | None = field(default=None, kw_only=True)
    seq: int | None = field(default=None, kw_only=True)
    traffic: Traffic | None = field(default=None, kw_only=True)
    via: str | None = field(default=None, kw_only=True)
    why: str | None = field(default=None, kw_only=True)

    @property
    def place(self) -> Place | None:
        return self.group

    @property
    def exchange(self) -> Exchange:
        """The meaning of this collective in terms of ranks."""
        raise NotImplementedError(f"{self.opcode} declares no exchange")

    def transposed(self, operands: tuple[Value, ...]) -> Collective:
        """The collective, without results, that brings the receivers' cotangents to the senders.

        It has the same group. The receivers of this op give, and its senders receive; other members
        may receive as well.
        """
        raise NotImplementedError(f"{self.opcode} has no transpose")

    @property
    def tensors(self) -> tuple[Value, ...]:
        """The operands that travel: the first of each sender."""
        return self.operands[: len(self.operands) // self.operands_each]

    @property
    def operand_places(self) -> tuple[Place | None, ...]:
        return tuple([Place((rank,)) for rank in self.exchange.senders]) * self.operands_each

    @property
    def result_places(self) -> tuple[Place, ...]:
        """For each result in a program over all ranks, the place where it is made."""
        if self.exchange.is_shared:
            return (self.group,)
        return tuple([Place((rank,)) for rank in self.group.ranks])

    def by_rank(self) -> Mapping[int, tuple[tuple[Value, ...], tuple[Value, ...]]]:
        """The operands and results of each rank of the group, in a program over all ranks."""
        exchange = self.exchange
        count = len(exchange.senders)
        operands = {r: self.operands[i::count] for i, r in enumerate(exchange.senders)}
        if exchange.is_shared:
            results = dict.fromkeys(exchange.members, self.results)
        else:
            pairs = zip(exchange.members, self.results, strict=True)
            results = {rank: (value,) for rank, value in pairs}
        return {rank: (operands.get(rank, ()), results[rank]) for rank in exchange.members}

    def check(self, context: CheckContext) -> None:
        exchange = self.exchange
        for preposition, ends in (("from", exchange.senders), ("to", exchange.receivers)):
            if ends is exchange.members:
                continue
            for stranger in set(ends).difference(exchange.members):
                raise Problem(
                    f"{self.opcode} {preposition} rank {stranger}, which is not of the group "
                    f"{self.group}"
                )
        broken = exchange.problem
        if broken is not None:
            raise Problem(f"{self.opcode} of {self.group}: {broken.message}", broken.help)
        one_rank = context.phase is Phase.SCHEDULED
        members = len(exchange.members)
        operands = len(exchange.senders)
        if one_rank:
            all_send = exchange.senders == exchange.members
            operands = int(all_send or context.program.rank in exchange.senders)
        expect_operands(self, operands * self.operands_each, self.operand_rule)
        single = one_rank or exchange.is_shared
        expect_results(self, 1 if single else members, "one result (scattered: one for each rank)")
        futures = has_futures(context.phase)
        result_types = [expect_future(v, self) if futures else v.type for v in self.results]
        piece = self._piece(exchange, result_types[0])
        ranks = (context.program.rank,) if one_rank else exchange.members
        for rank, value, type_ in zip(ranks, self.results, result_types, strict=False):
            gets = rank in exchange.receivers or exchange.has_one_result_type
            expected = piece if gets else UnitType()
            if not same_but_place(type_, expected):
                raise Problem(
                    f"this {self.opcode} makes {bare(expected)}, not {bare(type_)}", "", value
                )

    def _piece(self, exchange: Exchange, result_type: Type) -> Type:
        """The type of the value that receivers get; `result_type` where there are no operands."""
        if not exchange.senders:
            return UnitType()
        if not self.operands:
            return result_type
        first, *others = self.tensors
        dim = exchange.cut if exchange.cut is not None else exchange.concat
        if dim is None and exchange.reduce is None:
            return first.type
        type_ = expect_tensor(first, self)
        for value in others:
            expect_type(value, type_, f"the {self.opcode} has, from another rank,")
        if dim is None:
            return type_
        members = len(exchange.members)
        if not 0 <= dim < len(type_.shape):
            raise Problem(f"{self.opcode} along dimension {dim} of {bare(type_)}", "", first)
        size = type_.shape[dim]
        if exchange.cut is not None:
            if size % members:
                raise Problem(
                    f"{self.opcode} divides dimension {dim}, of {size}, among {members} ranks",
                    f"make it a multiple of {members}",
                    first,
                )
            size //= members
        return resized(type_, dim, size * members if exchange.concat is not None else size)

    def check_places(self, context: CheckContext) -> None:
        check_ranks(self.group, context.module, self.opcode)
        for value, place in zip(self.results, self.result_places, strict=True):
            if value.type.place != place:
                raise Problem(
                    f"%{value.name} is at {value.type.place}, this {self.opcode} makes it at "
                    f"{place}",
                    "",
                    value,
                )


_EACH = "one tensor for each rank, all of one type"


@dataclass(eq=False, slots=True)
class AllReduce(Collective):
    """Combine the group's tensors elementwise; every rank gets the result.

    With `donated`, nothing uses the operands any more, so a rank's result may take the memory of
    its operand.
    """

    opcode: ClassVar[str] = "all_reduce"
    takes: ClassVar[str] = _EACH
    gives: ClassVar[str] = "that type, at the group"
    adjoint: ClassVar[Adjoint | None] = Adjoint.SAME
    op: ReduceOp = field(default=ReduceOp.SUM, kw_only=True)
    donated: bool | None = field(default=None, kw_only=True)

    @property
    def shared_operand(self) -> Value | None:
        return self.operands[0] if self.donated and self.operands else None

    @property
    def exchange(self) -> Exchange:
        group = self.group.ranks
        return Exchange(group, group, group, reduce=self.op)


@dataclass(eq=False, slots=True)
class AllGather(Collective):
    """Concatenate the group's tensors along `dim`; every rank gets the result."""

    opcode: ClassVar[str] = "all_gather"
    takes: ClassVar[str] = _EACH
    gives: ClassVar[str] = "`dim` times the ranks, at the group"
    adjoint: ClassVar[Adjoint | None] = Adjoint.PART
    dim: int = field(default=0, kw_only=True)

    @property
    def exchange(self) -> Exchange:
        group = self.group.ranks
        return Exchange(group, group, group, concat=self.dim)


@dataclass(eq=False, slots=True)
class ReduceScatter(Collective):
    """Combine the group's tensors elementwise, then give each rank its part along `dim`."""

    opcode: ClassVar[str] = "reduce_scatter"
    takes: ClassVar[str] = _EACH
    gives: ClassVar[str] = "for each rank its part of `dim`"
    adjoint: ClassVar[Adjoint | None] = Adjoint.TRANSPOSE
    op: ReduceOp = field(default=ReduceOp.SUM, kw_only=True)
    dim: int = field(default=0, kw_only=True)

    @property
    def exchange(self) -> Exchange:
        group = self.group.ranks
        return Exchange(group, group, group, cut=self.dim, reduce=self.op)

    def transposed(self, operands: tuple[Value, ...]) -> Collective:
        return AllGather(operands, group=self.group, dim=self.dim)


@dataclass(eq=False, slots=True)
class AllToAll(Collective):
    """Rank i sends its j-th part along `dim` to rank j, and concatenates the parts that it gets."""

    opcode: ClassVar[str] = "all_to_all"
    takes: ClassVar[str] = _EACH
    gives: ClassVar[str] = "for each rank the same type"
    adjoint: ClassVar[Adjoint | None] = Adjoint.TRANSPOSE
    dim: int = field(default=0, kw_only=True)

    @property
    def exchange(self) -> Exchange:
        group = self.group.ranks
        return Exchange(group, group, group, cut=self.dim, concat=self.dim)

    def transposed(self, operands: tuple[Value, ...]) -> Collective:
        return AllToAll(operands, group=self.group, dim=self.dim)


@dataclass(eq=False, slots=True)
class Broadcast(Collective):
    """Give the value of rank `root` to every rank of the group."""

    opcode: ClassVar[str] = "broadcast"
    takes: ClassVar[str] = "the root's value"
    gives: ClassVar[str] = "the same type, at the group"
    adjoint: ClassVar[Adjoint | None] = Adjoint.SAME
    shares_operand: ClassVar[bool] = True
    operand_rule: ClassVar[str] = "one operand, on the root's rank alone"
    root: int = field(default=0, kw_only=True)

    @property
    def exchange(self) -> Exchange:
        group = self.group.ranks
        return Exchange(group, (self.root,), group)


@dataclass(eq=False, slots=True)
class Gather(Collective):
    """Concatenate the group's tensors along `dim` for rank `root`; the other ranks get a unit."""

    opcode: ClassVar[str] = "gather"
    takes: ClassVar[str] = _EACH
    gives: ClassVar[str] = "for the root `dim` times the ranks, for each other rank a `unit`"
    adjoint: ClassVar[Adjoint | None] = Adjoint.TRANSPOSE
    root: int = field(default=0, kw_only=True)
    dim: int = field(default=0, kw_only=True)

    @property
    def exchange(self) -> Exchange:
        group = self.group.ranks
        return Exchange(group, group, (self.root,), concat=self.dim)

    def transposed(self, operands: tuple[Value, ...]) -> Collective:
        return Scatter(operands, group=self.group, root=self.root, dim=self.dim)


@dataclass(eq=False, slots=True)
class Scatter(Collective):
    """Give each rank of the group its part along `dim` of the tensor of rank `root`."""

    opcode: ClassVar[str] = "scatter"
    takes: ClassVar[str] = "the root's tensor"
    gives: ClassVar[str] = "for each rank its part of `dim`"
    adjoint: ClassVar[Adjoint | None] = Adjoint.TRANSPOSE
    operand_rule: ClassVar[str] = "one operand, on the root's rank alone"
    root: int = field(default=0, kw_only=True)
    dim: int = field(default=0, kw_only=True)

    @property
    def exchange(self) -> Exchange:
        group = self.group.ranks
        return Exchange(group, (self.root,), group, cut=self.dim)

    def transposed(self, operands: tuple[Value, ...]) -> Collective:
        return Gather(operands, group=self.group, root=self.root, dim=self.dim)


@dataclass(eq=False, slots=True)
class Barrier(Collective):
    """Hold each rank of the group until all of them have come here."""

    opcode: ClassVar[str] = "barrier"
    takes: ClassVar[str] = "none"
    gives: ClassVar[str] = "`unit`, at the group"
    synchronizes: ClassVar[bool] = True
    operand_rule: ClassVar[str] = "no operand"

    @property
    def exchange(self) -> Exchange:
        return Exchange(self.group.ranks, (), ())
