"""Ops that bring a value from rank to rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..attributes import COMMUNICATION_STREAMS, Stream, Traffic
from ..layout import Region
from ..phases import Phase
from ..types import FutureType, Place, TensorType, Type, UnitType
from .base import Adjoint, Op
from .rank_local import check_unchanged
from .row_collectives import check_rows
from .rules import (
    CheckContext,
    Problem,
    bare,
    expect_future,
    expect_operands,
    expect_results,
    expect_tensor,
    expect_type,
    same_but_layout,
    same_but_place,
)


@dataclass(eq=False, slots=True)
class Transfer(Op):
    """Bring a value to another place, or lay a tensor out in another way.

    `via` names the transport, and `why` gives the reason for it. Without `via`, the value takes the
    transport that carries every value. `traffic` is set if the transfer gathers stored parameters,
    reduces their gradients, or is a step of a ring. `donated` is as in `all_reduce`, if the
    transfer becomes one.

    Before PLACED, a transfer of copies does not change the place: it only says by which transport
    its operand travels to the ops that use the result.

    Summands are combined, unless the result has summands along the same axes of the same mesh.
    Copies may become summands. Of a sum, the first rank along the axes keeps its copy, and the
    others have zeros; of a maximum or minimum, each rank keeps its copy.

    With `experts`, the second operand has ids, and a row travels only between ranks of which one
    has an id of the row among its experts. The first `lead` dimensions are rows, as in
    `all_gather_rows`, and `experts` has a region for each rank of the mesh. A rank that gathers
    gets zeros, or the true numbers, for other rows than its own, and a rank's summand has zeros
    there. If a collective cannot do it, as where pieces are uneven, all rows travel. `dispatch`
    says which form `choose-dispatch` has chosen, and why. `form` is of the first exchange of an op
    that could be laid out in several ways, as attention over a cut sequence: the way, and why.
    """

    opcode: ClassVar[str] = "transfer"
    takes: ClassVar[str] = "a value; with `experts`, then ids"
    gives: ClassVar[str] = "the same type at another place, or of another layout"
    phases: ClassVar[frozenset[Phase]] = frozenset({Phase.TRACED, Phase.PLACED})
    remedy: ClassVar[str] = (
        "split-transfers turns it into send, recv and wait; before that, insert-transfers makes it"
    )
    adjoint: ClassVar[Adjoint | None] = Adjoint.TRAVELS
    takes_layouts: ClassVar[bool] = True
    takes_summands: ClassVar[bool] = True
    traffic: Traffic | None = field(default=None, kw_only=True)
    donated: bool | None = field(default=None, kw_only=True)
    dispatch: str | None = field(default=None, kw_only=True)
    form: str | None = field(default=None, kw_only=True)
    experts: tuple[Region, ...] | None = field(default=None, kw_only=True)
    lead: int | None = field(default=None, kw_only=True)
    via: str | None = field(default=None, kw_only=True)
    why: str | None = field(default=None, kw_only=True)

    @property
    def place(self) -> Place | None:
        ranks: dict[int, None] = {}
        for value in (self.operands[0], *self.results):
            if value.type.place is not None:
                ranks.update(dict.fromkeys(value.type.place.ranks))
        return Place(tuple(ranks)) if ranks else None

    @property
    def changes_layout(self) -> bool:
        """True if the result is laid out in another way than the operand."""
        return not same_but_place(self.operands[0].type, self.result.type)

    def check(self, context: CheckContext) -> None:
        expect_operands(
            self, 1 if self.experts is None else 2, "one operand; with experts, ids too"
        )
        expect_results(self, 1, "one result")
        source, target = self.operands[0].type, self.result.type
        if self.experts is not None:
            self._check_rows(self.experts)
        if not same_but_layout(source, target):
            check_unchanged(self)
        _check_summands(self, source, target)
        if isinstance(source, TensorType) and (source.layout is not None or self.changes_layout):
            return
        if context.phase is not Phase.TRACED:
            return
        if self.result.type.place != self.operands[0].type.place or self.via is None:
            raise Problem(
                "a transfer in phase traced only says how its operand travels to where the result "
                "is used, so it stays where it is and names a transport",
                f"write {{via = ...}}, and {self.operands[0].type}; insert-transfers makes the "
                "others",
            )

    def _check_rows(self, experts: tuple[Region, ...]) -> None:
        """Raise unless the ids and the experts fit."""
        check_rows(
            self, expect_tensor(self.result, self), self.lead or 0, self.operands[1:], experts
        )
        places = [value.type.place for value in (*self.operands, self.result)]
        for value, place in zip(self.operands, places, strict=False):
            if place != places[-1] or (place is not None and len(place.ranks) != len(experts)):
                raise Problem(
                    f"rows travel between the ranks of one mesh, which all have the ids, and have "
                    f"experts; %{value.name} is {value.type}, the result {self.result.type}",
                    "write the experts of each rank, and the ids of each",
                    value,
                )

    def check_places(self, context: CheckContext) -> None:
        """Check nothing: a transfer goes from any place to any place."""

    def check_operand_places(self, context: CheckContext) -> None:
        """Check nothing: a transfer goes from any place to any place."""


def _check_summands(op: Transfer, source: Type, target: Type) -> None:
    """Raise if a transfer would make summands from a cut tensor; it can make them from copies."""
    old, new = (t.layout if isinstance(t, TensorType) else None for t in (source, target))
    if old is None or new is None or not new.summands:
        return
    cut_axes = {axis for cut in old.cuts for axis in cut.axes}
    if source.place == target.place:
        cut_axes.intersection_update(new.summands)
    if cut_axes:
        raise Problem(
            f"the transfer makes summands along {'.'.join(new.summands)} of {bare(source)}, which "
            f"is cut along {'.'.join(sorted(cut_axes))}",
            "summands are made of copies; make these first, by another transfer",
            op.result,
        )


@dataclass(eq=False, slots=True)
class PointToPoint(Op):
    """One end of a message between two ranks."""

    phases: ClassVar[frozenset[Phase]] = frozenset({Phase.ASYNC, Phase.SCHEDULED})
    remedy: ClassVar[str] = "split-transfers makes it"
    streams: ClassVar[frozenset[Stream]] = COMMUNICATION_STREAMS
    chan: int = field(default=0, kw_only=True)
    peer: int = field(default=0, kw_only=True)
    seq: int = field(default=0, kw_only=True)
    slot: int | None = field(default=None, kw_only=True)
    batch: int | None = field(default=None, kw_only=True)


@dataclass(eq=False, slots=True)
class Send(PointToPoint):
    """Start sending the operand to `peer`; once the future is done, the operand is free again.

    `seq` counts the messages of channel `chan` within one execution. `slot` is the buffer of the
    channel that carries the message, once `plan-buffers` has chosen it. A send and a receive with
    the same `batch` are one operation at both ends: neither waits for the other.
    """

    opcode: ClassVar[str] = "send"
    takes: ClassVar[str] = "a value"
    gives: ClassVar[str] = "`future<unit>`"

    def check(self, context: CheckContext) -> None:
        expect_operands(self, 1, "one operand")
        expect_results(self, 1, "one result, future<unit>")
        expect_type(self.result, FutureType(UnitType()), "send makes")


@dataclass(eq=False, slots=True)
class Recv(PointToPoint):
    """Start receiving from `peer`, into the buffer that is the operand, if there is one.

    The attributes are as in `send`.
    """

    opcode: ClassVar[str] = "recv"
    streams: ClassVar[frozenset[Stream]] = COMMUNICATION_STREAMS | {Stream.COMPUTE}
    takes: ClassVar[str] = "none, or a buffer of the type that is promised"
    gives: ClassVar[str] = "`future<T>`"
    shares_operand: ClassVar[bool] = True

    def check(self, context: CheckContext) -> None:
        if len(self.operands) > 1:
            raise Problem(f"recv takes one buffer or none, here it has {len(self.operands)}")
        expect_results(self, 1, "one result, a future")
        promised = expect_future(self.result, self)
        if self.operands:
            expect_type(self.operands[0], promised, "a receive into it promises")


def batch_of(op: Op) -> int | None:
    """The batch of an op; None if it is no message, or in no batch."""
    return op.batch if isinstance(op, PointToPoint) else None
