"""The random draws of a traced forward, for a backward that computes a part of it again.

A checkpoint calls its function once more. What that draws is not drawn again: the backward takes
what the forward has drawn, as it takes other values. So the numbers are the same, whatever the
layout is, and however the step is scheduled.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from ...values.operators import argument_of, storage_key

_ATEN = torch.ops.aten
_DROPOUT = _ATEN.native_dropout.default


@dataclass(frozen=True)
class _Draw:
    """A call of an operator that draws.

    Attributes:
        op: the operator.
        results: what it has drawn.
        writes: the number of writes to the memory of each, once the call is over.
        copies: copies of these, for the case that the forward changes them in place. A graph that
            does not use the copies does not make them.
    """

    op: torch._ops.OpOverload
    results: tuple[torch.Tensor, ...]
    writes: tuple[int, ...]
    copies: tuple[torch.Tensor, ...]


class Draws:
    """The draws of a forward, by number."""

    def __init__(self) -> None:
        self._draws: dict[int, _Draw] = {}
        self._writes: Counter[int | None] = Counter()

    def note_write(self, memory: int | None) -> None:
        """Count a write of an operator to memory."""
        self._writes[memory] += 1

    def note(self, number: int | None, op: torch._ops.OpOverload, result: Any) -> None:
        """Note a draw of the forward, with its number."""
        results = tuple(result) if isinstance(result, (list, tuple)) else (result,)
        if op is _DROPOUT:
            results = results[1:]  # the mask
        if number is None or not all(isinstance(value, torch.Tensor) for value in results):
            return
        copies = tuple(_ATEN.clone.default(value) for value in results)
        self._draws[number] = _Draw(op, results, self._writes_to(results), copies)

    def _writes_to(self, results: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
        return tuple(self._writes[storage_key(value)] for value in results)

    def again(self, number: int | None, op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        """The results of a draw that is repeated; None if it is not one of the forward's."""
        draw = None if number is None else self._draws.get(number)
        if draw is None or draw.op is not op:
            return None
        if self._writes_to(draw.results) == draw.writes:
            drawn = [_ATEN.detach.default(value) for value in draw.results]
        else:  # the part that is computed again changes them in place again
            drawn = [_ATEN.clone.default(value) for value in draw.copies]
        if op is _DROPOUT:
            rate = argument_of(op, args, kwargs, "p")
            scale = 0.0 if rate == 1 else 1 / (1 - rate)
            return args[0] * drawn[0] * scale, drawn[0]
        if op._schema.is_mutable:
            return _ATEN.copy_.default(args[0], drawn[0])
        return tuple(drawn) if len(drawn) > 1 else drawn[0]
