"""Rules of ops that draw random numbers.

A rank draws the numbers of the whole tensor, and keeps its piece, so a layout changes no number.
Ranks draw from one state, in the order of the graph. No draw may wait for an exchange: an op that
takes a tensor, but not its values, draws into empty memory instead, which depends on no exchange.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .....ir.layout import Layout
from ..cases import Answer, Case, Expansion, LocalOp, Rule
from .creation import made, whole_then_piece

_ATEN = torch.ops.aten
_MEMORY = _ATEN.empty_strided.default


def _drawn(case: Case) -> Answer:
    # Not free: a second op would draw other numbers.
    return replace(made(case, {}), local=whole_then_piece, free=frozenset())


def _by(function: Callable[..., Any]) -> Rule:
    """The rule of an op that draws for each entry of its first operand, whatever the entry is.

    Args:
        function: computes the op by other ops, one of which draws into empty memory. It takes the
            op, and the op's arguments by name.
    """

    def rule(case: Case) -> Answer | Expansion:
        operand = case.operands[0]
        if operand.node.target is not _MEMORY or len(operand.node.users) > 1:
            return Expansion(partial(function, case.target), {_MEMORY: operand.cuts})
        layout = Layout(operand.cuts)
        results = (layout,) * len(case.shapes)
        return Answer((layout,), results, local=partial(_local, operand.node.meta["val"]))

    return rule


def _local(whole: torch.Tensor, op: LocalOp) -> Any:
    """Draw for the whole tensor, and take the rank's pieces of the results."""
    memory = op.emit(
        _MEMORY, list(whole.shape), list(whole.stride()), dtype=whole.dtype, device=whole.device
    )
    drawn = op.run(**{op.target._schema.arguments[0].name: memory})
    regions = [region for region in op.results if region is not None]
    if len(regions) == 1:
        return op.piece(drawn, regions[0])
    items = [op.emit(operator.getitem, drawn, index) for index in range(len(regions))]
    return tuple(op.piece(item, region) for item, region in zip(items, regions, strict=True))


def _memory_as(like: torch.Tensor) -> torch.Tensor:
    """Empty memory with the strides of a tensor: kernels draw in the order of the memory."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def _made_like(op: torch._ops.OpOverload, self: torch.Tensor, **arguments: Any) -> Any:
    return op(_memory_as(self), **arguments)


def _written(op: torch._ops.OpOverload, self: torch.Tensor, **arguments: Any) -> Any:
    return self.copy_(op(_memory_as(self), **arguments))


def _dropped(op: torch._ops.OpOverload, input: torch.Tensor, p: float, train: bool | None) -> Any:
    """Dropout as a product with a mask that has been drawn."""
    _, mask = op(_memory_as(input), p, train)
    return input * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def _dropout(case: Case) -> Answer | Expansion:
    if case["train"] is False or not case["p"]:  # it draws nothing
        layout = Layout(case.operands[0].cuts)
        return Answer((layout,), (layout, layout))
    return _by(_dropped)(case)


RULES: Mapping[object, Rule] = {
    **dict.fromkeys(
        (
            *(_ATEN.rand.default, _ATEN.randn.default, _ATEN.randint.default),
            *(_ATEN.randint.low, _ATEN.randperm.default),
        ),
        _drawn,
    ),
    **dict.fromkeys(
        (_ATEN.rand_like.default, _ATEN.randn_like.default, _ATEN.randint_like.default),
        _by(_made_like),
    ),
    **dict.fromkeys(
        (
            *(_ATEN.bernoulli_.float, _ATEN.uniform_.default, _ATEN.normal_.default),
            _ATEN.exponential_.default,
        ),
        _by(_written),
    ),
    _ATEN.native_dropout.default: _dropout,
}
