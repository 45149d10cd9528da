"""What adjusted logits should be: by transformers' processors, and by formulas in plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from examples.serve.requests import Adjustments


def adjusted(
    logits: Tensor, prompt: Sequence[int], out: Sequence[int], wanted: Adjustments
) -> Tensor:
    """The logits [vocabulary] behind a prompt and the tokens of the answer so far."""
    scores = logits.float()[None].clone()
    vocabulary = range(scores.shape[1])
    taken = set(wanted.banned)
    if wanted.allowed is not None:
        taken |= set(vocabulary) - set(wanted.allowed)
    if len(out) < wanted.min_tokens:
        taken |= set(wanted.held)
    if taken:
        scores = SuppressTokensLogitsProcessor(sorted(taken))(None, scores)
    answer = torch.tensor([list(out)], dtype=torch.int64)
    if wanted.bad_words:
        words = [list(word) for word in wanted.bad_words]
        scores = NoBadWordsLogitsProcessor(words)(answer, scores)
    if wanted.biases:
        biases = {(token,): bias for token, bias in wanted.biases}
        scores = SequenceBiasLogitsProcessor(biases)(answer, scores)
    both = torch.tensor([[*prompt, *out]])
    if wanted.repetition != 1:
        scores = RepetitionPenaltyLogitsProcessor(wanted.repetition)(both, scores)
    for token, count in Counter(out).items():
        scores[0, token] -= wanted.frequency * count + wanted.presence
    return scores[0]


def with_min_p(scaled: Tensor, wanted: Adjustments) -> Tensor:
    """Logits [vocabulary] over temperature, without tokens that `min_p` excludes."""
    if not wanted.min_p:
        return scaled
    return MinPLogitsWarper(wanted.min_p)(None, scaled[None].clone())[0]
