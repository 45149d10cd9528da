"""Choose whether all tokens travel to the ranks of experts, or the rows of these alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, get_args

from ...ir.layout import volume
from ...ir.ops import Op, Transfer, Value
from ...ir.ops.module import Module, Program
from ...ir.ops.row_collectives import expected_share
from ...ir.phases import Phase
from ...ir.text.diagnostics import error
from ...ir.types import TensorType, Type
from ..base import Pass
from .fabrics import Fabrics
from .resharding import plan
from .resharding_plan import GatherRound, ReduceRound
from .routed_fibres import RoutedFibres

Dispatch: TypeAlias = Literal["auto", "gather", "exchange"]
"""How rows come to experts, and back."""

DISPATCHES: tuple[str, ...] = get_args(Dispatch)

_Kind: TypeAlias = tuple[object, ...]
"""The types of a transfer's operands and of its result, its experts, and its `lead`."""

LEAST_SAVED = 256 * 1024
"""Bytes that a rank need not receive, for which it is worth to pick rows out of a tensor."""


@dataclass(frozen=True)
class ChooseDispatch(Pass):
    """Choose the form of each transfer between tokens and experts that are cut over ranks.

    A transfer with `experts` may move the rows alone that are of a rank's experts: an exchange. The
    pass takes ids and experts off the others, which then gather all rows, or reduce them. It
    compares what a rank receives: all rows of the others, or the share of them that is expected
    where any choice of experts is as likely as any other. `dispatch` of the transfer says why. An
    exchange that is asked for, where no transfer can be one, is an error. The remarks of the pass
    count the transfers of each stage by what it has chosen.

    The host picks the rows. A device's host would have to wait for the ids in each layer, so where
    a rank has a device all rows travel.

    Before::

        mesh @m {ep = 4, ranks = {0..3}}
        %y = transfer(%x, %ids) {experts = {[0:2], [2:4], [4:6], [6:8]}, lead = 1} : f32[8,4]@m

    After::

        %y = transfer(%x) {dispatch = "gather: ..."} : f32[8,4]@m

    Options:
        dispatch: `gather` or `exchange` for all transfers; `auto`: whatever saves enough bytes.
        ranks: the transports of devices, as in `choose-transports`.
    """

    dispatch: str = "auto"
    ranks: str = ""

    name: ClassVar[str] = "choose-dispatch"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.PLACED,)

    def __post_init__(self) -> None:
        if self.dispatch not in DISPATCHES:
            raise ValueError(f"dispatch={self.dispatch!r}: it is {', '.join(DISPATCHES)}")

    def run(self, module: Module) -> bool:
        program = module.program
        routed = [op for op in program.ops if isinstance(op, Transfer) and op.experts is not None]
        if not routed and self.dispatch == "exchange":
            raise error(
                "rows are to be exchanged, but none travel to experts that are cut over ranks, or "
                "from them, in the order of the ids",
                program=program,
                help="cut experts and the batch along one axis, the batch last along this one, as "
                "by cg.cut(0, 'dp', 'ep'); or leave out dispatch='exchange'",
            )
        # Layers and microbatches have transfers of the same types.
        known: dict[_Kind, tuple[tuple[str, str], tuple[int, int]]] = {}
        for op in routed:
            kind = (*(value.type for value in (*op.operands, op.result)), op.experts, op.lead)
            if kind not in known:
                known[kind] = self._problem(op), _received(op)
            (problem, remedy), (whole, some) = known[kind]
            if problem and self.dispatch == "exchange":
                raise error(
                    f"rows are to be exchanged, but {problem}", op=op, program=program, help=remedy
                )
            asked = "asked for" if self.dispatch != "auto" else ""
            if not problem and (self.dispatch == "exchange" or self._pays(whole - some)):
                why = asked or "saves enough"
                op.dispatch = f"exchange: {why}; {some} of {whole} bytes a rank"
                continue
            why = problem or asked or "an exchange saves little"
            op.dispatch = f"gather: {why}; {whole} bytes a rank, by exchange {some}"
            op.operands, op.experts, op.lead = op.operands[:1], None, None
        _drop_copies(program, {op.operands[0] for op in routed if op.experts is None})
        return bool(routed)

    def remarks(self, module: Module) -> tuple[str, ...]:
        transfers = [op for op in module.program.ops if isinstance(op, Transfer)]
        counts = Counter((_stage(op), op.dispatch) for op in transfers if op.dispatch is not None)
        forms = Counter((_stage(op), op.form) for op in transfers if op.form is not None)
        return (
            *(
                f"rows of experts{stage}: {count} transfer{'s' * (count > 1)}, {dispatch}"
                for (stage, dispatch), count in counts.items()
            ),
            *(
                f"attention{stage}: {count} call{'s' * (count > 1)}, {form}"
                for (stage, form), count in forms.items()
            ),
        )

    def _pays(self, saved: int) -> bool:
        return self.dispatch == "auto" and saved >= LEAST_SAVED

    def _problem(self, op: Transfer) -> tuple[str, str]:
        """Why rows cannot be exchanged, and what to do; empty if they can."""
        fabrics, place = Fabrics(self.ranks), op.result.type.place
        assert place is not None, "a placed program says where values are"
        for rank in place.ranks:
            if fabrics.of_rank(rank) is not None:
                return (
                    f"rank {rank} has a device, whose host would have to wait for the ids",
                    "use dispatch='gather' or 'auto', or give these ranks no device",
                )
        if not _fits(op):
            return (
                "ranks have uneven pieces, or pieces that do not stand one behind the other",
                "use a batch that is a multiple of the ranks that cut it, or dispatch='auto'",
            )
        return "", ""


def _fits(op: Transfer) -> bool:
    """True if collectives can move the rows of a transfer."""
    routed, have, target = RoutedFibres.of(op), op.operands[0].type, op.result.type
    assert routed is not None, "the caller has looked"
    assert isinstance(have, TensorType), "only tensors have rows"
    assert isinstance(target, TensorType), "only tensors have rows"
    rounds = plan(have, target).rounds
    collectives = [step for step in rounds if isinstance(step, GatherRound | ReduceRound)]
    moved = any(step.received() for step in rounds if step not in collectives)
    return not moved and len(collectives) == 1 and routed.fit(collectives[0].fibres)


def _bytes(op: Transfer) -> int:
    """The bytes of all rows that a rank receives from the others."""
    have, target = op.operands[0].type, op.result.type
    assert isinstance(have, TensorType), "only tensors have rows"
    assert isinstance(target, TensorType), "only tensors have rows"
    received = plan(have, target).received()
    return max(received.values(), default=0) * target.dtype.itemsize


def _stage(op: Transfer) -> str:
    """The part of a step that a transfer is of, in words; empty if it is of no task."""
    task = op.task
    return "" if task is None else f" in {task.action.name.lower()} of stage {task.stage}"


def _received(op: Transfer) -> tuple[int, int]:
    """The bytes that a rank receives of all rows, and those that are expected of an exchange."""
    (type_, ids), experts = [value.type for value in op.operands], op.experts
    assert isinstance(type_, TensorType), "only tensors have rows"
    assert isinstance(ids, TensorType), "ids are a tensor"
    assert experts is not None, "the caller has looked"
    count = sum(map(volume, set(experts)))
    choices = ids.numel // max(math.prod(type_.shape[: op.lead]), 1)
    shares = [expected_share(region, count, choices) for region in experts]
    number = _bytes(op)
    return number, round(sum(shares) / len(shares) * number)


def _drop_copies(program: Program, gathered: Set[Value]) -> None:
    """Let all ops take the first of several transfers of a value that are equal without ids."""
    first: dict[tuple[Value, Type, str | None], Value] = {}
    same: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in program.ops:
        if same:
            op.operands = tuple([same.get(value, value) for value in op.operands])
        if isinstance(op, Transfer) and op.experts is None and op.operands[0] in gathered:
            result = first.setdefault((op.operands[0], op.result.type, op.via), op.result)
            if result is not op.result:
                same[op.result] = result
                continue
        ops.append(op)
    program.ops[:] = ops
