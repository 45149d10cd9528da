"""The builtin functions of the IR, on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...ir import builtins
from ...ir.module import Function
from ..base import Body


def _add(left: Tensor, right: Tensor) -> Sequence[Tensor]:
    return (torch.add(left, right),)


IMPLEMENTATIONS: dict[str, Body] = {builtins.ADD: _add}


def implementation(function: Function) -> Body:
    """The body of a function of kind BUILTIN.

    Raises:
        ValueError: the name is not of a known builtin.
    """
    return IMPLEMENTATIONS[builtins.meaning(function)]
