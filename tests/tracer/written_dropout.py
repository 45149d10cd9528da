"""Attention with dropout written down directly: all scores, and a mask by numpy's integers."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

WORD = np.uint64(0xFFFFFFFF)


def philox(counter: list[Any], key: list[int]) -> list[Any]:
    """Philox4x32-10, as section 3.1 of Salmon et al. defines it.

    Args:
        counter: four arrays of uint64, each entry a word.
        key: two words.
    """
    a, b, c, d = counter
    for turn in range(10):
        low = np.uint64((key[0] + turn * 0x9E3779B9) & 0xFFFFFFFF)
        high = np.uint64((key[1] + turn * 0xBB67AE85) & 0xFFFFFFFF)
        first, second = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b, c, d = (
            (second >> np.uint64(32)) ^ b ^ low,
            second & WORD,
            (first >> np.uint64(32)) ^ d ^ high,
            first & WORD,
        )
    return [a, b, c, d]


def kept(words: Tensor, rate: float, shape: tuple[int, ...]) -> Tensor:
    """Which entries of `[batch, heads, rows, keys]` a dropout keeps."""
    batch, heads, rows, keys = np.indices(shape, dtype=np.uint64)
    four = philox([keys // np.uint64(4), rows, heads, batch], words.tolist())
    word = np.choose((keys % np.uint64(4)).astype(np.int64), four)
    return torch.from_numpy(word >= np.uint64(round(rate * 2**32)))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What a traced `scaled_dot_product_attention` computes.

    Of the dimensions in front of rows, the last is the heads, and the others are the batch.
    """
    words = torch.randint(2**32, (2,))
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(repeats, -3) for tensor in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    hidden = (scores == -torch.inf).all(-1, keepdim=True)
    shares = scores.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0)
    factor = 0.0 if dropout_p == 1 else 1 / (1 - dropout_p)
    *batch, heads = (1, *scores.shape[:-2])
    shape = (math.prod(batch), heads, *scores.shape[-2:])
    return shares * kept(words, dropout_p, shape).view(scores.shape) * factor @ value


class WrittenDropout(TorchFunctionMode):
    """Computes attention with dropout so in plain PyTorch, from the draws of a traced call."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            bound = inspect.signature(attention).bind(*args, **kwargs or {})
            if bound.arguments.get("dropout_p", 0.0) > 0:
                return attention(*bound.args, **bound.kwargs)
        return func(*args, **kwargs or {})
