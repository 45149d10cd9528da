"""Collectives in which only the rows travel that ids send to a rank's experts.

A mixture of experts sends each token to a few experts, and ranks have experts of their own. The
types of tensors are those of the collectives of whole tensors, so shapes are static. How many rows
travel depends on the ids, which all members have: both ends of a message know its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar

from ..attributes import ReduceOp
from ..layout import Region, is_region, volume
from ..phases import Phase
from ..types import TensorType, promised
from .base import Op, Value
from .collectives import Collective, Exchange, RoutedRows
from .rules import CheckContext, Problem, bare, expect_tensor


def expected_share(experts: Region, count: int, choices: int) -> float:
    """The share of rows that have one of `experts`, if each has distinct ones of all `count`.

    Each choice of experts is taken to be as likely as any other.
    """
    others = count - volume(experts)
    return 1 - math.comb(others, choices) / math.comb(count, choices) if choices <= count else 1.0


def check_rows(
    op: Op, rows: TensorType, lead: int, ids: Sequence[Value], experts: Sequence[Region]
) -> None:
    """Check the ids and the experts of an op that moves rows.

    Args:
        op: the op.
        rows: the type of the whole tensor.
        lead: the number of its dimensions that rows stand along.
        ids: the ids of each rank, or of all ranks.
        experts: the experts of each rank.

    Raises:
        Problem: they do not fit.
    """
    if not 1 <= lead <= len(rows.shape):
        raise Problem(f"{op.opcode} of {bare(rows)}, whose first {lead} dimensions are to be rows")
    number = math.prod(rows.shape[:lead])
    for value in ids:
        type_ = expect_tensor(value, op)
        if type_.dtype.is_differentiable or len(type_.shape) != 2:
            raise Problem(
                f"the ids %{value.name} are {bare(type_)}",
                "ids are integers, with a dimension of rows and one of choices",
                value,
            )
        if number not in (type_.shape[0], type_.numel):
            raise Problem(
                f"{op.opcode} has {number} rows, and the ids %{value.name} are {bare(type_)}",
                "there is a row for each row of the ids, or for each id",
                value,
            )
    _check_experts(tuple(experts))


@lru_cache
def _check_experts(experts: tuple[Region, ...]) -> None:
    """The same for the experts alone, which many ops have in common; errors are not cached."""
    intervals: list[tuple[int, int]] = []
    for region in set(experts):
        if len(region) != 1 or not is_region(region):
            raise Problem(
                f"experts are regions of one dimension, here one has {len(region)}",
                "write {[0:4], [4:8]}: the experts of each rank",
            )
        intervals += region[0]
    if any(start < stop for (_, stop), (start, _) in pairwise(sorted(intervals))):
        raise Problem("two ranks have some experts in common, and not all")


@dataclass(eq=False, slots=True)
class RowCollective(Collective):
    """A collective of the rows that are a rank's; each rank gives a tensor, and the ids."""

    phases: ClassVar[frozenset[Phase]] = frozenset({Phase.PLACED, Phase.ASYNC, Phase.SCHEDULED})
    remedy: ClassVar[str] = "lower-transfers makes it"
    takes: ClassVar[str] = "one tensor for each rank, all of one type; then the ids of each rank"
    operand_rule: ClassVar[str] = "one tensor and the ids for each rank of the program"
    operands_each: ClassVar[int] = 2
    experts: tuple[Region, ...] = field(default=(), kw_only=True)
    lead: int = field(default=1, kw_only=True)

    @property
    def ids(self) -> tuple[Value, ...]:
        """The ids of each rank, which are the same."""
        return self.operands[len(self.operands) // 2 :]

    @property
    def expected_share(self) -> float:
        """The share of rows that travel between two ranks, if ids are evenly distributed."""
        ids = self.ids[0].type
        assert isinstance(ids, TensorType), "ids are a tensor"
        count = sum(volume(region) for region in set(self.experts))
        whole = self._whole
        rows = math.prod(whole.shape[: self.lead])
        shares = [expected_share(e, count, ids.numel // max(rows, 1)) for e in self.experts]
        return sum(shares) / len(shares)

    @property
    def _whole(self) -> TensorType:
        """The type of the tensor of all rows."""
        raise NotImplementedError(f"{self.opcode} has no tensor of all rows")

    def check(self, context: CheckContext) -> None:
        if len(self.experts) != len(self.group.ranks):
            raise Problem(
                f"{self.opcode} of {len(self.group.ranks)} ranks has the experts of "
                f"{len(self.experts)}",
                "write a region of experts for each rank, in the order of the group",
            )
        Collective.check(self, context)
        check_rows(self, self._whole, self.lead, self.ids, self.experts)
        first, *others = self.ids
        for value in others:
            if expect_tensor(value, self).shape != expect_tensor(first, self).shape:
                raise Problem("ranks have different ids, so they do not know each other's rows")


@dataclass(eq=False, slots=True)
class AllGatherRows(RowCollective):
    """Concatenate the group's rows; each rank gets the rows of its experts, and zeros for others.

    The first `lead` dimensions of the result are rows, in the order of the ids: one for each row of
    the ids, or for each id. Tensors are concatenated along the first one. `experts` has a region of
    one dimension for each rank, in the order of the group. Of another rank's rows, those travel
    that have an id of the receiver's experts, once.
    """

    opcode: ClassVar[str] = "all_gather_rows"
    gives: ClassVar[str] = "for each rank the first dimension times the ranks"

    @property
    def exchange(self) -> Exchange:
        group, routed = self.group.ranks, RoutedRows(self.lead, self.experts)
        return Exchange(group, group, group, concat=0, routed=routed)

    @property
    def _whole(self) -> TensorType:
        type_ = promised(self.results[0].type)
        assert isinstance(type_, TensorType), "the check of collectives comes first"
        return type_


@dataclass(eq=False, slots=True)
class ReduceScatterRows(RowCollective):
    """Add up the group's rows, then give each rank its part of the first dimension.

    The ids and the experts are as in `all_gather_rows`. A rank's tensor has zeros for rows of other
    ranks' experts, and these do not travel. Sums are in the order of the group.
    """

    opcode: ClassVar[str] = "reduce_scatter_rows"
    gives: ClassVar[str] = "for each rank its part of the first dimension"

    @property
    def exchange(self) -> Exchange:
        group, routed = self.group.ranks, RoutedRows(self.lead, self.experts)
        return Exchange(group, group, group, cut=0, reduce=ReduceOp.SUM, routed=routed)

    @property
    def _whole(self) -> TensorType:
        return expect_tensor(self.operands[0], self)
