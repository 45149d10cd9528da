"""Bring every value to the ranks that use it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ...ir.ops import Backward, Op, Return, Transfer, Value
from ...ir.ops.module import Module, Program
from ...ir.ops.names import Names
from ...ir.phases import Phase
from ...ir.text.diagnostics import error
from ...ir.types import Place, TensorType, relocate
from ..base import Pass


@dataclass(frozen=True)
class InsertTransfers(Pass):
    """Insert a `transfer` wherever a value is used on a rank that does not hold it.

    A value travels to each rank once, at its first use there; later uses take the copy. A transfer
    goes to several ranks at once if an op needs the value on several ranks, as an output of the
    step may, or if at least `broadcast_from` single ranks need it. Its result is at the ranks that
    had the value and at those that got it. A transfer belongs to the microbatch of the op that made
    the value. A transfer that delivers an output of the step belongs to none, since outputs are
    delivered when all microbatches are done.

    Transfers in the step that change a place or a layout stay. Laid-out tensors get no transfers,
    as only the program can say how they are to be laid out elsewhere.

    Before::

        %h = call(%x) {fn = @stage0.forward, mb = 0} : f32[2,8]@0
        %l = call(%h) {fn = @stage1.loss, mb = 0} : f32[]@1
        return(%l) {at = {0..1}}

    After::

        %h = call(%x) {fn = @stage0.forward, mb = 0} : f32[2,8]@0
        %h.at1 = transfer(%h) {mb = 0} : f32[2,8]@1
        %l = call(%h.at1) {fn = @stage1.loss, mb = 0} : f32[]@1
        %l.all = transfer(%l) : f32[]@{0..1}
        return(%l.all) {at = {0..1}}

    Attributes:
        broadcast_from: the least number of single ranks that need a value for it to be broadcast.
    """

    broadcast_from: int = 3

    name: ClassVar[str] = "insert-transfers"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.TRACED,)
    ensures: ClassVar[Phase | None] = Phase.PLACED

    def run(self, module: Module) -> bool:
        program = module.program
        for op in program.ops:
            if isinstance(op, Backward):
                raise error(
                    "a backward cannot be placed before it is differentiated",
                    op=op,
                    program=program,
                    help="run the pass 'differentiate' before 'insert-transfers'",
                )
        couriers = _Couriers(Names.of(program), self._wide(program.ops), program.ops)
        ops: list[Op] = []
        for op in program.ops:
            if isinstance(op, Transfer):
                if op.result.type == op.operands[0].type:
                    couriers.take_note(op)
                else:
                    ops.append(couriers.explicit(op))
                continue
            for index, need in _needs(op):
                value = op.operands[index]
                have = value.type.place
                if have is None or (value not in couriers.routed and have == need):
                    continue
                if have != need:
                    _check_travels(value, need, op, program)
                brought = couriers.bring(value, have, need, op, ops)
                if brought is not value:
                    op.operands = (*op.operands[:index], brought, *op.operands[index + 1 :])
            ops.append(op)
        program.ops[:] = ops
        module.phase = Phase.PLACED
        return True

    def _wide(self, ops: list[Op]) -> dict[Value, frozenset[int]]:
        """The values to broadcast, as enough single ranks lack them, with these ranks."""
        lacking: dict[Value, set[int]] = {}
        for op in ops:
            for index, need in _needs(op):
                value = op.operands[index]
                have = value.type.place
                if have is not None and need.is_single and not have.covers(need):
                    lacking.setdefault(value, set()).add(need.rank)
        return {
            value: frozenset(ranks)
            for value, ranks in lacking.items()
            if len(ranks) >= self.broadcast_from
        }


class _Couriers:
    """Makes transfers, and knows the copies so far.

    Attributes:
        routed: for each result of a user's transfer that only names a transport, the value itself
            and the transport.
    """

    def __init__(self, names: Names, wide: dict[Value, frozenset[int]], ops: list[Op]) -> None:
        self._names = names
        self._wide = wide
        self._makers = {value: op for op in ops for value in op.results}
        self._copies: dict[Value, list[Value]] = {}
        self.routed: dict[Value, tuple[Value, str | None]] = {}

    def take_note(self, op: Transfer) -> None:
        """Note the transport that a user's transfer names for a value; the transfer is dropped."""
        (value,) = op.operands
        self.routed[op.result] = (self.routed.get(value, (value, None))[0], op.via)

    def explicit(self, op: Transfer) -> Transfer:
        """Make a user's transfer take the value itself and, by default, the value's transport."""
        sources = [self.routed.get(value, (value, None)) for value in op.operands]
        op.operands = tuple([source for source, _ in sources])
        _, via = sources[0]
        op.via = op.via if op.via is not None else via
        return op

    def bring(self, value: Value, have: Place, need: Place, user: Op, ops: list[Op]) -> Value:
        """A copy of `value` at all ranks of `need`; if there is none yet, a new op makes it.

        Args:
            value: the value, which is at `have`.
            have: the ranks that have it.
            need: the ranks that need it.
            user: the op that needs it.
            ops: the ops so far; the new op is appended.
        """
        source, via = self.routed.get(value, (value, None))
        if have.covers(need):
            return source
        copies = self._copies.setdefault(value, [])
        for copy in copies:
            if copy.type.place is not None and copy.type.place.covers(need):
                return copy
        target = self._target(value, have, need)
        suffix = f"at{target.rank}" if target.is_single else "all"
        name = self._names.fresh(f"{source.name}.{suffix}")
        copy = Value(name, relocate(value.type, target))
        maker = self._makers.get(source)
        loc = user.loc if maker is None or maker.loc is None else maker.loc
        mb = None if maker is None or isinstance(user, Return) else maker.mb
        ops.append(Transfer((source,), (copy,), via=via, loc=loc, mb=mb))
        copies.append(copy)
        return copy

    def _target(self, value: Value, have: Place, need: Place) -> Place:
        wide = self._wide.get(value, frozenset())
        if need.is_single and not wide:
            return need
        return Place(tuple(sorted({*have.ranks, *need.ranks, *wide})))


def _check_travels(value: Value, need: Place, user: Op, program: Program) -> None:
    """Check that a value which is to travel has no layout.

    Raises:
        IRError: it has one, so that it can only be used where it is.
    """
    type_ = value.type
    if not isinstance(type_, TensorType) or type_.layout is None:
        return
    copies = TensorType(type_.dtype, type_.shape, need)
    raise error(
        f"value '{value.name}' is laid out as {type_}, and used at {need}",
        op=user,
        program=program,
        value=value,
        help=f"bring it there by a transfer that says in which layout: "
        f"transfer(%{value.name}) : {copies} gives each rank a copy",
    )


def _needs(op: Op) -> Iterator[tuple[int, Place]]:
    """For each operand of an op, its index and the ranks that take it."""
    if not isinstance(op, Transfer):
        for index, place in enumerate(op.operand_places):
            if place is not None:
                yield index, place
