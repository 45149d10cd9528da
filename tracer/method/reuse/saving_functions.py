"""The marks of `cg.keep` and its kin as functions that a method calls, for its log of functions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..purity.dispatch_modes import run_noted
from ..purity.function_log import OfGraph

KEEP = "keep"
RECOMPUTE = "recompute"
OFFLOAD = "offload"

SAVED = frozenset({KEEP, OFFLOAD})
"""The marks of values that are never computed again."""

META = "cg.saving"
"""The key of a node's mark."""


class SavingMark(OfGraph):
    """Marks a value of a method, and returns it.

    Args:
        mark: `KEEP`, `RECOMPUTE` or `OFFLOAD`. Functions with the same mark are equal.
        apply: marks a tensor.
    """

    def __init__(
        self, mark: str, apply: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    ) -> None:
        self.mark = mark
        self._apply = apply

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return self._apply(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SavingMark) and other.mark == self.mark

    def __hash__(self) -> int:
        return hash(self.mark)


def noted(mark: SavingMark, value: torch.Tensor) -> torch.Tensor:
    """Mark a value; a method that is traced, or compared with a trace, notes it."""
    return run_noted(mark, (value,))  # type: ignore[no-any-return]
