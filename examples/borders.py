"""A check that documents which are packed into one window do not see each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from texts import IGNORED, successors
from torch import Tensor


def check(evaluate: Callable[..., Any], rows: int, length: int, vocabulary: int) -> None:
    """Compute the loss of a document behind each of two others.

    Masks follow from positions that begin anew only in models that make them so, and nothing else
    tells the other ones apart.

    Args:
        evaluate: gives the mean loss of ids, labels and positions, all int64 [rows, length].
        rows, length: the shape that it takes.
        vocabulary: how many ids there are.

    Raises:
        ValueError: the loss depends on the document in front.
    """
    generator = torch.Generator().manual_seed(0)
    half = length // 2
    ids = torch.randint(vocabulary, (rows, length), generator=generator)
    others = ids.clone()
    others[:, :half] = torch.randint(vocabulary, (rows, half), generator=generator)
    places = torch.cat([torch.arange(half), torch.arange(length - half)])
    positions = places.repeat(rows, 1)
    labels: Tensor = successors(ids, positions)
    labels[:, :half] = IGNORED
    first, second = (float(evaluate(tokens, labels, positions)) for tokens in (ids, others))
    if abs(first - second) > 1e-5 * abs(first):
        raise ValueError(
            f"--pack: the loss of a document is {first} or {second} nats, by what stands in front "
            "of it in its window: this model does not mask by positions that begin anew; leave out "
            "--pack"
        )
