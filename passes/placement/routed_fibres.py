"""Fibres of ranks that exchange only the rows of each other's experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...ir.layout import Region, covers, whole
from ...ir.ops import Transfer, Value
from ...ir.types import TensorType
from .resharding_plan import Fibre


@dataclass(frozen=True)
class RoutedFibres:
    """The rows of a transfer, and the ids and experts that say which of them travel.

    Attributes:
        ids: the ids of all rows.
        type: their type, with its place.
        experts: the experts of each rank.
        lead: the number of dimensions of the transferred tensor that rows stand along.
        shape: the shape of that tensor.
    """

    ids: Value
    type: TensorType
    experts: dict[int, Region]
    lead: int
    shape: tuple[int, ...]

    @staticmethod
    def of(op: Transfer) -> RoutedFibres | None:
        """Those of a transfer; None if all rows travel."""
        if op.experts is None:
            return None
        ids, type_ = op.operands[1], op.result.type
        assert isinstance(type_, TensorType), "only tensors have rows"
        assert isinstance(ids.type, TensorType), "ids are a tensor"
        assert type_.place is not None, "a placed program says where values are"
        experts = dict(zip(type_.place.ranks, op.experts, strict=True))
        return RoutedFibres(ids, ids.type, experts, op.lead or 1, type_.shape)

    def fit(self, fibres: Iterable[Fibre]) -> bool:
        """True if a collective can move the rows of the members of each fibre alone.

        Their pieces stand one behind the other, and each member has the ids of all rows.
        """
        return all(map(self._fits, fibres))

    def _fits(self, fibre: Fibre) -> bool:
        inner = slice(1, self.lead)
        is_dense = fibre.dim == 0 and fibre.is_dense and len(fibre.region[0]) == 1
        if not is_dense or fibre.region[inner] != whole(self.shape)[inner]:
            return False
        if not self.shape[0] or self.type.shape[0] % self.shape[0]:
            return False  # an entry of the first dimension has no ids of its own
        region = self.region(fibre)
        return all(covers(self.type.region(rank), region) for rank in fibre.ranks)

    def region(self, fibre: Fibre) -> Region:
        """The region of the ids of a fibre's rows."""
        count = self.type.shape[0] // self.shape[0]
        ((start, stop),) = fibre.region[0]
        return ((start * count, stop * count),), whole(self.type.shape)[1]

    def experts_of(self, fibre: Fibre) -> tuple[Region, ...]:
        """The experts of the members."""
        return tuple([self.experts[rank] for rank in fibre.ranks])
