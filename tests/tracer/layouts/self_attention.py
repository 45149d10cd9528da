"""A layer of attention in float64, with masks of several kinds, and with dropout."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 4
MASKS = ("none", "causal", "window", "documents", "padding", "bias")


class SelfAttention(nn.Module):
    """A layer of attention, float64.

    Args:
        heads, groups: of queries, and of keys and values.
        mask: one of `MASKS`.
        rate: of the dropout within attention.
    """

    def __init__(self, heads: int, groups: int, mask: str, rate: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.groups, self.mask, self.rate = heads, groups, mask, rate
        self.q, self.k, self.v = (nn.Linear(6, WIDTH * n) for n in (heads, groups, groups))
        self.o = nn.Linear(WIDTH * heads, 6)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in self.layers)
        h = functional.scaled_dot_product_attention(
            *(q, k, v, self.masked(x), self.rate),
            is_causal=self.mask == "causal",
            enable_gqa=True,
        )
        made: Tensor = self.o(h.transpose(1, 2).flatten(2))
        return made

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        return self.q, self.k, self.v

    def masked(self, x: Tensor) -> Tensor | None:
        at = torch.arange(x.shape[1])
        distance = at[:, None] - at
        if self.mask == "window":
            return (distance >= 0) & (distance < 3)
        if self.mask == "documents":
            document = at // 3
            return (distance >= 0) & (document[:, None] == document)
        if self.mask == "padding":
            return (at >= x.shape[1] // 3)[None, None, None]
        return distance.double() / 8 if self.mask == "bias" else None
