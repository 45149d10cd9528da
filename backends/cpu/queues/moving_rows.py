"""The rows that members of a group send each other where ids say which ones travel."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

import torch
from torch import Tensor

from ....ir.ops import Exchange, RoutedRows
from ...exchanges import own_rows

_MOST: Final = 64
"""The ids whose rows are kept, by group: those of some layers and microbatches."""


class MemberRows:
    """The rows that have an id of each member's experts; members are numbers in the group.

    Args:
        routed: the experts of each member.
        shape: the shape of the tensor of all rows.
        ids: `[rows, choices]`, the same at all members.

    Attributes:
        part: the rows of each member's piece.
    """

    def __init__(self, routed: RoutedRows, shape: Sequence[int], ids: Tensor) -> None:
        self._masks = own_rows(routed, shape, ids)
        self.part = len(self._masks[0]) // len(self._masks)
        self._rows: dict[tuple[int, int], Tensor] = {}

    def mask(self, member: int, piece: int) -> Tensor:
        """A mask of the rows of a piece that are a member's."""
        return self._masks[member].narrow(0, piece * self.part, self.part)

    def rows(self, member: int, piece: int) -> Tensor:
        """The rows of a piece that are a member's, ascending."""
        rows = self._rows.get((member, piece))
        if rows is None:
            rows = self._rows[member, piece] = self.mask(member, piece).nonzero().view(-1)
        return rows


class KnownRows:
    """The rows that exchanges of a group have in common: those of equal ids.

    A layer's exchanges, forward and backward, take the same ids. Ids are compared by their numbers:
    their memory may be another process's, or NumPy's, whose writes torch does not count.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, MemberRows] = {}

    def of(self, routed: RoutedRows, shape: Sequence[int], ids: Tensor) -> MemberRows:
        """The rows of each member."""
        numbers = ids.contiguous().numpy().tobytes()
        key = routed.experts, tuple(shape[: routed.lead]), tuple(ids.shape), ids.dtype, numbers
        rows = self._known.get(key)
        if rows is None:
            if len(self._known) == _MOST:
                del self._known[next(iter(self._known))]  # the oldest
            rows = self._known[key] = MemberRows(routed, shape, ids)
        return rows


class MovingRows:
    """The rows of the messages of one collective.

    A message to several receivers has each row once that one of them needs. All members compute
    the same from the same ids, so a message says nothing of its rows.

    Args:
        exchange: the collective; its tensors are concatenated, or combined and cut.
        of_members: the rows of each member.
    """

    def __init__(self, exchange: Exchange, of_members: MemberRows) -> None:
        self._gathers = exchange.concat is not None
        self._of_members, self._part = of_members, of_members.part

    def sent(self, source: int, receivers: Sequence[int]) -> Tensor:
        """The rows of a member's tensor that are in its message to some others, ascending."""
        known = self._of_members
        if self._gathers:
            if len(receivers) == 1:
                return known.rows(receivers[0], source)
            total, *others = [known.mask(receiver, source) for receiver in receivers]
            for mask in others:
                total = total | mask
            return total.nonzero().view(-1)
        parts = [known.rows(source, receiver) + receiver * self._part for receiver in receivers]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def taken(
        self, source: int, receivers: Sequence[int], receiver: int
    ) -> tuple[Tensor | None, Tensor]:
        """The rows that a receiver takes of a message, and their places in its result.

        Returns:
            The numbers of the message's rows, None for all; and the rows of the receiver's result.
        """
        known = self._of_members
        if not self._gathers and len(receivers) == 1:
            return None, known.rows(source, receiver)
        rows = self.sent(source, receivers)
        positions = None
        if len(receivers) > 1:
            if self._gathers:
                is_own = known.mask(receiver, source)[rows]
            else:
                is_own = rows.div(self._part, rounding_mode="floor") == receiver
            positions = is_own.nonzero().view(-1)
            rows = rows[positions]
        return (
            positions,
            rows + source * self._part if self._gathers else rows - receiver * self._part,
        )

    def own(self, member: int) -> Tensor:
        """A mask of the rows of a member's own piece that are its own, `[rows, 1]`."""
        return self._of_members.mask(member, member).unsqueeze(1)
