"""Attention with functions of scores, all of which are in memory: the eager formula of torch.

Torch's own code for it copies a number from the host, which a graph of a device cannot capture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import _permute_strides

_LN_2 = math.log(2)


@dataclass(frozen=True)
class DenseAttention:
    """Attention of queries, keys and values.

    Attributes:
        query, key, value: `[B, H, S, E]`, `[B, G, T, E]` and `[B, G, T, F]`; `G` divides `H`.
        scale: the factor of products.
        mask: takes four indices, and gives whether a score counts.
        masked: the tensors that `mask` takes behind them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    mask: Callable[..., Any]
    masked: Sequence[Tensor]

    def forward(
        self, score: Callable[..., Any], captured: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The result, and for each row the logarithm, to base 2, of its sum, and its largest score.

        Args:
            score: takes a score, four indices and the captured tensors.
            captured: the tensors that it takes.
        """
        _, scores = self._scores(score, captured)
        logsumexp = torch.where(_hidden(scores), -math.inf, scores.logsumexp(-1))
        shares = torch._safe_softmax(scores, -1).to(self.query.dtype)
        out = shares @ self._of_heads(self.value)
        strided = _permute_strides(out, self.query.stride())
        return strided, logsumexp / _LN_2, scores.max(-1)[0] / _LN_2

    def backward(
        self,
        score: Callable[..., Any],
        joint: Callable[..., Any],
        captured: Sequence[Tensor],
        results: tuple[Tensor, Tensor],
        given: tuple[Tensor | None, Tensor | None],
    ) -> tuple[list[Tensor], Sequence[Tensor | None]]:
        """The gradients of queries, keys and values, and of captured tensors.

        Args:
            score, captured: as in `forward`.
            joint: the derivative of `score`.
            results: the result, and the logarithms of sums.
            given: their gradients.
        """
        out, logsumexp = results[0], results[1] * _LN_2
        products, scores = self._scores(score, captured)
        shares = torch.exp(scores - logsumexp.unsqueeze(-1))
        shares = torch.where((logsumexp == -math.inf).unsqueeze(-1), 0, shares)
        gradient = torch.zeros_like(out) if given[0] is None else given[0]
        wide, dtype = shares.dtype, self.query.dtype
        of_value = shares.to(dtype).transpose(-2, -1) @ gradient
        of_shares = gradient.to(wide) @ self._of_heads(self.value).to(wide).transpose(-2, -1)
        of_shares = of_shares - (out.to(wide) * gradient.to(wide)).sum(-1, keepdim=True)
        if given[1] is not None:
            of_shares = of_shares + (given[1] / _LN_2).unsqueeze(-1)
        of_all = _over_all(
            joint, (0,), (0, *[None] * len(captured)), [0, *[None] * (4 + len(captured))]
        )
        own = of_all(products, *self._indices(), shares * of_shares, *captured)
        of_scores = torch.where(self._mask(), (own[0] * self.scale).to(dtype), 0)
        gradients = [
            of_scores @ self._of_heads(self.key),
            self._by_group(of_scores.transpose(-2, -1) @ self.query),
            self._by_group(of_value),
        ]
        pairs = zip(gradients, (self.query, self.key, self.value), strict=True)
        return [_permute_strides(own, like.stride()) for own, like in pairs], own[5:]

    def _scores(
        self, score: Callable[..., Any], captured: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The scaled products, and the scores; those that do not count are minus infinity."""
        wide = torch.promote_types(self.query.dtype, torch.float32)
        keys = self._of_heads(self.key).to(wide)
        products = self.query.to(wide) @ keys.transpose(-2, -1) * self.scale
        scores = _over_all(score, (0,), (None,) * len(captured))(
            products, *self._indices(), *captured
        )
        return products, torch.where(self._mask(), scores.to(wide), -math.inf)

    def _mask(self) -> Tensor:
        counts: Tensor = _over_all(self.mask, (), (None,) * len(self.masked))(
            *self._indices(), *self.masked
        )
        return counts

    def _indices(self) -> list[Tensor]:
        sizes = (*self.query.shape[:3], self.key.shape[2])
        return [torch.arange(size, device=self.query.device) for size in sizes]

    def _of_heads(self, tensor: Tensor) -> Tensor:
        """Keys or values, once for each head of queries."""
        return torch.repeat_interleave(tensor, self.query.shape[1] // tensor.shape[1], dim=1)

    def _by_group(self, gradient: Tensor) -> Tensor:
        rows, heads, *others = gradient.shape
        groups = self.key.shape[1]
        return gradient.view(rows, groups, heads // groups, *others).sum(2)


def _hidden(scores: Tensor) -> Tensor:
    """The rows of which no score counts."""
    return torch.all(scores == -math.inf, dim=-1)


def _over_all(
    function: Callable[..., Any],
    before: tuple[int | None, ...],
    behind: tuple[int | None, ...],
    results: Any = 0,
) -> Callable[..., Any]:
    """A function of single scores as one of all scores.

    Args:
        function: takes four indices between other arguments.
        before, behind: for each of these others 0 if it is of single scores, too, and else None.
        results: the same for its results.
    """
    for index in reversed(range(4)):
        indices = [0 if number == index else None for number in range(4)]
        function = torch.vmap(function, (*before, *indices, *behind), results)
    return function
