"""Restrict replicated work to the ranks that need its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...ir.attributes import Effect
from ...ir.ops import Call, Constant, Copy, Op, Value, View
from ...ir.ops.module import Function, FunctionKind, Module
from ...ir.phases import Phase
from ...ir.types import Place, TensorType, relocate
from ..base import Pass


@dataclass(frozen=True)
class PlaceReplicated(Pass):
    """Narrow replicated ops to the ranks that use them, and make constants where they are used.

    Only ops without effects or actors move: constants, views, copies, and calls of pure functions
    that belong to no actor. Ops that take or make a laid-out tensor run on all of its ranks. Ops
    that no rank needs do not move; `dce` removes them.

    Before::

        %part = view(%x) {dim = 0, length = 2, mb = 0, start = 0} : f32[2,8]@{0..3}
        %h = call(%part) {fn = @stage0.forward, mb = 0} : f32[2,8]@0

    After::

        %part = view(%x) {dim = 0, length = 2, mb = 0, start = 0} : f32[2,8]@0
        %h = call(%part) {fn = @stage0.forward, mb = 0} : f32[2,8]@0
    """

    name: ClassVar[str] = "place"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.TRACED,)
    optional: ClassVar[bool] = True

    def run(self, module: Module) -> bool:
        changed = False
        rank_masks: dict[Value, int] = {}
        for op in reversed(module.program.ops):
            if _is_movable(module, op):
                changed = _move(op, rank_masks) or changed
            _want_operands(op, rank_masks)
        return changed


def _is_movable(module: Module, op: Op) -> bool:
    if isinstance(op, Call):
        is_movable = _is_plain(module.functions[op.fn.name])
    else:
        is_movable = isinstance(op, (Constant, View, Copy))
    return is_movable and not (_are_laid_out(op.results) or _are_laid_out(op.operands))


def _are_laid_out(values: tuple[Value, ...]) -> bool:
    """True if any of the values is a tensor that is laid out."""
    for value in values:
        if isinstance(value.type, TensorType) and value.type.layout is not None:
            return True
    return False


def _is_plain(function: Function) -> bool:
    graph = function.kind is not FunctionKind.OPAQUE
    return graph and function.actor is None and function.effect is Effect.PURE


def _move(op: Op, rank_masks: dict[Value, int]) -> bool:
    ranks = 0
    for value in op.results:
        ranks |= rank_masks.get(value, 0)
    place = op.place
    if place is None or not ranks:
        return False
    if isinstance(op, Constant):
        chosen = tuple([rank for rank in range(ranks.bit_length()) if ranks >> rank & 1])
    else:
        chosen = tuple([rank for rank in place.ranks if ranks >> rank & 1])
    # If no rank that has the op needs it, the value travels from one rank, which makes it alone.
    chosen = chosen or (min(place.ranks),)
    if set(chosen) == set(place.ranks):
        return False
    new = Place(chosen)
    for value in op.results:
        value.type = relocate(value.type, new)
    return True


def _want_operands(op: Op, rank_masks: dict[Value, int]) -> None:
    """Note the ranks that take each operand of an op; sets of ranks are bits of an integer."""
    last, mask = None, 0
    for index, place in enumerate(op.operand_places):
        if place is None:
            continue
        if place is not last:
            last, ranks = place, place.ranks
            mask = 1 << ranks[0] if len(ranks) == 1 else sum([1 << rank for rank in ranks])
        value = op.operands[index]
        rank_masks[value] = rank_masks.get(value, 0) | mask
