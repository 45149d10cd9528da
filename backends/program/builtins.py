"""The builtin functions of the IR, on torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...ir import builtins
from ...ir.module import Function
from ..base import Body


def _body(function: Callable[[Tensor, Tensor], Tensor]) -> Body:
    def run(left: Tensor, right: Tensor) -> Sequence[Tensor]:
        return (function(left, right),)

    return run


IMPLEMENTATIONS: dict[str, Body] = {
    builtins.ADD: _body(torch.add),
    builtins.MULTIPLY: _body(torch.mul),
    builtins.MINIMUM: _body(torch.minimum),
    builtins.MAXIMUM: _body(torch.maximum),
}


def implementation(function: Function) -> Body:
    """The body of a function of kind BUILTIN.

    Raises:
        ValueError: the name is not of a known builtin.
    """
    return IMPLEMENTATIONS[builtins.meaning(function)]
