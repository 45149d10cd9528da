"""Formulas that change logits ahead of the draw, as vLLM defines them.

All take logits float32 [rows, vocabulary] and give new ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 32
"""Tokens of a word of packed bits."""


def unpack(words: Tensor, count: int) -> Tensor:
    """The first `count` bits of rows of words, bool [rows, count]; the lowest bit comes first.

    Args:
        words: int32 [rows, at least count / `BITS`].
    """
    places = torch.arange(BITS, device=words.device, dtype=torch.int32)
    bits = (words[:, :, None] >> places) & 1
    return bits.flatten(1)[:, :count] != 0


def penalize(
    logits: Tensor,
    counts: Tensor,
    seen: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Make tokens that there are already less likely, or more likely.

    The penalty of repetitions is that of N. Keskar and others, "CTRL", 2019; OpenAI has defined the
    others.

    Args:
        counts: int32 [rows, vocabulary], how often each token is in the answer.
        seen: bool [rows, vocabulary], whether it is in the prompt.
        repetition, frequency, presence: float32 [rows], as in `Adjustments`.
    """
    factor = torch.where(seen | (counts > 0), repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def add_biases(logits: Tensor, tokens: Tensor, biases: Tensor) -> Tensor:
    """Add biases float32 [rows, number] to the logits of tokens int64 [rows, number]."""
    return logits.scatter_add(1, tokens, biases)


def forbid_endings(logits: Tensor, words: Tensor, recent: Tensor) -> Tensor:
    """Forbid the last token of each word whose other tokens have just been drawn.

    Args:
        words: int32 [rows, words, length], of tokens plus 1; shorter ones have zeros in front.
        recent: int32 [rows, length - 1], the last tokens of the answer plus 1; an answer that is
            shorter has zeros in front.
    """
    begun, last = words[:, :, :-1], words[:, :, -1]
    is_begun = ((begun == 0) | (begun == recent[:, None])).all(-1) & (last > 0)
    taken = torch.where(is_begun, -torch.inf, 0.0)
    # Padding takes 0 from the first token.
    return logits.scatter_add(1, (last - 1).clamp(0).long(), taken)
