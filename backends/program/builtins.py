"""The builtin functions of the IR, on torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...ir.ops import builtins
from ...ir.ops.module import Function
from ...ir.types import TensorType
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
    meaning = builtins.meaning(function)
    if meaning == builtins.PACK:
        return _packing(builtins.pieces_of(function))
    if meaning == builtins.UNPACK:
        return _unpacking(function)
    return IMPLEMENTATIONS[meaning]


def _packing(count: int) -> Body:
    """The body of a `pack`: each piece of the whole has a piece of each part."""
    if count == 1:
        return lambda *parts: (torch.cat(parts),)
    return lambda *parts: (torch.cat([part.view(count, -1) for part in parts], dim=1).view(-1),)


def _unpacking(function: Function) -> Body:
    """The body of an `unpack`; each part has memory of its own."""
    count = builtins.pieces_of(function)
    sizes = [type_.numel // count for type_ in function.outputs if isinstance(type_, TensorType)]

    def run(whole: Tensor) -> Sequence[Tensor]:
        parts = torch.split(whole.view(count, -1), sizes, dim=1)
        return tuple([part.clone(memory_format=torch.contiguous_format).view(-1) for part in parts])

    return run
