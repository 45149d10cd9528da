"""The rows that members of a group send each other where ids say which ones travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....ir.ops import Exchange
from ...exchanges import own_rows


class MovingRows:
    """The rows of the messages of one collective; members are numbers in the group.

    A message to several receivers has each row once that one of them needs. All members compute
    the same from the same ids, so a message says nothing of its rows.

    Args:
        exchange: the collective; its tensors are concatenated, or combined and cut.
        shape: the shape of the tensor of all rows.
        ids: `[rows, choices]`, the same at all members.
    """

    def __init__(self, exchange: Exchange, shape: Sequence[int], ids: Tensor) -> None:
        assert exchange.routed is not None, "only some rows travel"
        self._gathers = exchange.concat is not None
        self._masks = own_rows(exchange.routed, shape, ids)
        self._part = len(self._masks[0]) // len(exchange.members)

    def sent(self, source: int, receivers: Sequence[int]) -> Tensor:
        """The rows of a member's tensor that are in its message to some others, ascending."""
        if self._gathers:
            needed = [self._masks[receiver][self._piece(source)] for receiver in receivers]
            total, *others = needed
            for mask in others:
                total = total | mask
            return total.nonzero().view(-1)
        own = self._masks[source]
        parts = [own[self._piece(r)].nonzero().view(-1) + r * self._part for r in receivers]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def taken(
        self, source: int, receivers: Sequence[int], receiver: int
    ) -> tuple[Tensor | None, Tensor]:
        """The rows that a receiver takes of a message, and their places in its result.

        Returns:
            The numbers of the message's rows, None for all; and the rows of the receiver's result.
        """
        rows = self.sent(source, receivers)
        positions = None
        if len(receivers) > 1:
            if self._gathers:
                is_own = self._masks[receiver][self._piece(source)][rows]
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
        return self._masks[member][self._piece(member)].unsqueeze(1)

    def _piece(self, member: int) -> slice:
        return slice(member * self._part, (member + 1) * self._part)
