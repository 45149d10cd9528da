"""Interleaved 1F1B: several smaller chunks on each rank, for a smaller bubble."""

from __future__ import annotations

from ....ir.pipeline.order import Order, TaskRow
from .base import Pipeline, spell
from .layouts import loop


def interleaved_order(pipeline: Pipeline, chunks: int | None = None) -> Order:
    """Send groups of microbatches through one chunk after the other, with one B for each F.

    With four ranks of two chunks, a line each, and eight microbatches (digits are F, letters are
    B)::

        rank 0  0123    456...  7  .       aa bbcc.dd.  .  .  .  eeffgghh
                    0123   ...aa bb.4cc5dd6  7    .  .ee.ff.gg.hh
        rank 1  .0123    4..  5  6  7   aa bb cc dd.  .  .  .  eeffgghh..
                .    0123 ..aa bb cc dd4  5  6  7  .ee.ff.gg.hh        ..
        rank 2  ..0123   .     4  5  6aa7bb cc dd      .  .  eeffgghh....
                ..    012.aa3bb cc dd      4  5  6ee7ff.gg.hh        ....
        rank 3  ...0123            4aa5bb6cc7dd            eeffgghh......
                ...    0aa1bb2cc3dd            4ee5ff6gg7hh        ......

    With v chunks on each rank and m >= p, the bubble is that of 1F1B divided by v,
    (p - 1) (tf + tb + tw) / v. There are v times as many transfers, and more activations.
    Microbatches go in groups, so that a rank can start on its next chunk as soon as the group is
    through the last rank. Megatron-LM wants groups of exactly p; here they have at least p, so m
    need not be a multiple of p.

    Args:
        pipeline: its stages go round the ranks, as in 0,1,2,0,1,2.
        chunks: how often they go round; None: any number.

    Raises:
        ValueError: the stages lie on the ranks in another way.

    Source: Narayanan et al., arXiv 2104.04473, section 2.2.
    """
    order: dict[int, TaskRow] = {}
    rounds = loop(pipeline, chunks, "interleaved")
    p = len(rounds)
    groups = _groups(pipeline.microbatches, p)
    for r, (rank, parts) in enumerate(zip(pipeline.ranks, rounds, strict=True)):
        down = range(len(parts))
        forwards = [f"F{chunk}" for size in groups for chunk in down for _ in range(size)]
        backwards = [
            f"B{chunk}" for size in groups for chunk in reversed(down) for _ in range(size)
        ]
        ahead = min(len(forwards), (len(parts) - 1) * groups[0] + 2 * (p - r - 1))
        word = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            word += [forward, backward]
        word += backwards[len(backwards) - ahead :]
        order[rank] = spell(pipeline, parts, word)
    return order


def _groups(microbatches: int, ranks: int) -> list[int]:
    """The sizes of groups of at least `ranks` microbatches, as equal as possible, largest first."""
    count = max(1, microbatches // ranks)
    size, more = divmod(microbatches, count)
    return [size + 1] * more + [size] * (count - more)
