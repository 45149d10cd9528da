"""Draw tokens: greedy, temperature, min-p, top-k, top-p, with noise by hash.

A token is drawn by the Gumbel-max trick: the largest of logits / temperature + noise, where the
noise of each token of the vocabulary is a hash of the request's seed, the position and the token.
So what a request draws depends on nothing else in its batch, and torch's generators, which device
graphs cannot record, are not used.
"""

from __future__ import annotations

import torch
from torch import Tensor

import cg

from ..work import WORD

_LIBRARY = torch.library.Library("cg_sampling", "DEF")
_LIBRARY.define("running_sums(Tensor shares) -> Tensor")
# TorchInductor 2.11 fails at sums along so long rows, and then fuses nothing around them.
_LIBRARY.impl("running_sums", lambda shares: shares.cumsum(-1), "CompositeExplicitAutograd")
cg.layout_rule(torch.ops.cg_sampling.running_sums.default, "rv->rv", cut="r")
_LIBRARY.define("threshold(Tensor scaled, Tensor top_k, Tensor top_p) -> Tensor")
cg.layout_rule(torch.ops.cg_sampling.threshold.default, "rv,r,r->r", cut="r")

_LOW = 0xFFFFFFFF
FEW = 1024
"""The likeliest tokens that hosts look at first for top-p."""
LEAST = -9999.0
"""The log-probability of a token that cannot be drawn: JSON has no infinity."""


def greedy(logits: Tensor) -> Tensor:
    """The likeliest tokens, int64 [rows], of logits [rows, vocabulary]."""
    return logits.argmax(-1)


def allowed(logits: Tensor, masks: Tensor) -> Tensor:
    """Logits of which those of tokens that a mask leaves out are minus infinity.

    Args:
        logits: [rows, vocabulary].
        masks: int32 [rows, words], as `work.Masks`.
    """
    bits = torch.arange(WORD, dtype=torch.int32, device=masks.device)
    takes = (masks[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[-1]]
    return logits.masked_fill(takes == 0, -torch.inf)


def draw(
    logits: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor | None = None,
) -> Tensor:
    """Draw a token for each row.

    Args:
        logits: [rows, vocabulary], of any floating dtype.
        positions: int64 [rows], of the token that is drawn in its sequence.
        seeds: int64 [rows].
        temperatures: float32 [rows]; where it is 0, the likeliest token is taken.
        top_k: int64 [rows]; the number of the likeliest tokens that may be drawn, all if it is 0.
        top_p: float32 [rows]; of these tokens, only the fewest whose probabilities add up to it.
        min_p: float32 [rows]; before, only tokens that are so many times as likely as the
            likeliest. None: all.

    Returns:
        int64 [rows].
    """
    logits = logits.float()
    warm = temperatures > 0
    scaled = logits / torch.where(warm, temperatures, 1.0)[:, None]
    if min_p is not None:
        least = scaled.amax(-1, keepdim=True) + min_p.log()[:, None]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    scores = scaled + gumbel(seeds, positions, logits.shape[-1])
    on_host = scaled.device.type == "cpu"
    threshold = torch.ops.cg_sampling.threshold if on_host else _threshold
    scores = scores.masked_fill(scaled < threshold(scaled, top_k, top_p)[:, None], -torch.inf)
    return torch.where(warm[:, None], scores, logits).argmax(-1)


def score(logits: Tensor, drawn: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens and of the likeliest ones.

    Args:
        logits: [rows, vocabulary], before they are adjusted.
        drawn: int64 [rows], the tokens.
        count: of the likeliest tokens.

    Returns:
        float32 [rows, 1 + count], that of the token first; and int64 [rows, count], the likeliest.
        None is below `LEAST`.
    """
    shares = logits.float().log_softmax(-1).clamp(min=LEAST)
    values, tokens = shares.topk(count)
    return torch.cat([shares.gather(1, drawn[:, None]), values], 1), tokens


def rank(logits: Tensor, tokens: Tensor) -> Tensor:
    """The rank of a token in each row, int64 [rows]: 1 if none is likelier."""
    return (logits > logits.gather(1, tokens[:, None])).sum(-1) + 1


def _threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit of each row that may be drawn: top-k first, top-p of what is left."""
    ordered = _first(scaled.sort(-1, descending=True).values, top_k)
    return _least(ordered, ordered.softmax(-1), top_p)


def _first(ordered: Tensor, top_k: Tensor) -> Tensor:
    """Logits in descending order, of which those behind the first `top_k` are minus infinity."""
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    count = torch.where(top_k > 0, top_k, ordered.shape[-1])
    return ordered.masked_fill(rank >= count[:, None], -torch.inf)


def _least(ordered: Tensor, shares: Tensor, top_p: Tensor) -> Tensor:
    """The smallest of logits in descending order that top-p takes, by their probabilities."""
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    # A token is kept if those before it do not reach top_p, so the first one always is.
    sums = torch.ops.cg_sampling.running_sums(shares)
    left_out = (sums - shares >= top_p[:, None]) & (rank > 0)
    return ordered.masked_fill(left_out | (ordered == -torch.inf), torch.inf).amin(-1)


def _threshold_on_host(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The same, for rows that leave something out; few tokens are sorted where few are drawn."""
    vocabulary = scaled.shape[-1]
    threshold = scaled.new_full((len(scaled),), -torch.inf)
    is_short = (top_k > 0) & (top_k < vocabulary)
    if is_short.any():
        ordered = scaled[is_short].topk(int(top_k[is_short].max())).values
        ordered = _first(ordered, top_k[is_short])
        threshold[is_short] = _least(ordered, ordered.softmax(-1), top_p[is_short])
    rows = ~is_short & (top_p < 1)
    if not rows.any():
        return threshold
    total = scaled.logsumexp(-1, keepdim=True)
    for most in sorted({min(FEW, vocabulary), vocabulary}):
        ordered = scaled[rows].topk(most).values
        shares = (ordered - total[rows]).exp()
        threshold[rows] = _least(ordered, shares, top_p[rows])
        # Where the first ones do not reach top_p, all are looked at.
        rows[rows.clone()] = shares.sum(-1) < top_p[rows]
        if not rows.any():
            break
    return threshold


_LIBRARY.impl("threshold", _threshold_on_host, "CPU")
_LIBRARY.impl("threshold", lambda scaled, *_: scaled.new_empty(len(scaled)), "Meta")


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise, float32 [rows, vocabulary], by a hash of seed, position and token."""
    low, high = seeds & _LOW, (seeds >> 32) & _LOW
    row = _mix(_mix(_mix(low) ^ high) ^ (positions & _LOW))
    tokens = torch.arange(vocabulary, device=seeds.device)
    bits = _mix(_mix(tokens)[None] ^ row[:, None])
    # 24 bits are what float32 holds; the half keeps both logarithms finite.
    uniform = ((bits >> 8).float() + 0.5) * 2.0**-24
    return -(-uniform.log()).log()


def _mix(x: Tensor) -> Tensor:
    """Mix 32 bits, held in int64: the finalizer of MurmurHash3 (Austin Appleby, public domain).

    Products of 32 bits by 32 overflow 63, and the low 32 bits, which alone are kept, are right.
    """
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _LOW
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _LOW
    return x ^ (x >> 16)
