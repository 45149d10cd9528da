"""Find the part of a graph that repeats, as the layers of a model do.

In: the operators of a graph in their order. Out: where equal parts begin, one behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

LEAST = 64
"""Operators that repetitions must have besides the first; for fewer, a compiler's start takes
longer than it saves."""

_LIBRARIES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "convolution_backward",
    "_scaled_mm",
    "_grouped_mm",
)
"""Operators of torch that libraries compute, and that no kernel is fused with."""
_ATTENTION = "scaled_dot_product"


@dataclass(frozen=True)
class Repeat:
    """Parts of equal operators: `count` of them, of `length` operators, from `start` on."""

    start: int
    length: int
    count: int

    @property
    def bounds(self) -> list[int]:
        """Where each part begins, and where the last one ends."""
        return [self.start + number * self.length for number in range(self.count + 1)]


def find_repeat(
    nodes: Sequence[fx.Node],
    signature: Callable[[fx.Node], Any],
    costs: Sequence[float],
    least: int = LEAST,
) -> Repeat | None:
    """The repetition that saves a compiler the most operators; None if none saves `least`.

    Operators repeat with a period. Parts may begin anywhere in it: right behind a library's
    operator if possible, since what stands there is in no kernel with what follows, and else where
    the fewest bytes cross.

    Args:
        nodes: operators, in their order.
        signature: equal for operators that may be the same one in two parts.
        costs: of a cut ahead of each operator, and behind the last: bytes; infinite where none may
            be.
    """
    numbers: dict[Any, int] = {}
    signs = np.array([numbers.setdefault(signature(n), len(numbers)) for n in nodes], np.int32)
    saved, period, first, last = max(
        (_longest(signs, period) for period in range(1, len(nodes) // 2 + 1)),
        key=lambda run: (run[0], -run[1]),
        default=(0, 0, 0, 0),
    )
    if saved < least:
        return None
    choices = []
    for start in range(first, first + period):
        repeat = Repeat(start, period, (last - start) // period)
        price = max(costs[bound] for bound in repeat.bounds)
        is_fused_across = not is_of_library(nodes[start + period - 1])
        if repeat.count > 1 and price < float("inf"):
            choices.append((is_fused_across, -repeat.count, price, start, repeat))
    best = min(choices, key=lambda choice: choice[:4], default=None)
    if best is None or (best[-1].count - 1) * period < least:
        return None
    return best[-1]


def is_of_library(node: fx.Node) -> bool:
    """True for products, attention and operators of others, which are kernels of their own."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target.namespace not in ("aten", "prims"):
        return True
    name = target._schema.name.partition("::")[2]
    return name in _LIBRARIES or _ATTENTION in name


def _longest(signs: np.ndarray[Any, Any], period: int) -> tuple[int, int, int, int]:
    """The longest run in which each sign is that of a period ago.

    Returns:
        How many operators it saves; the period; where the run begins, and where it ends.
    """
    breaks = np.flatnonzero(signs[period:] != signs[:-period])
    edges = np.concatenate(([-1], breaks, [len(signs) - period]))
    lengths = np.diff(edges) - 1
    index = int(lengths.argmax())
    begin, length = int(edges[index]) + 1, int(lengths[index])
    return length // period * period, period, begin, begin + length + period
