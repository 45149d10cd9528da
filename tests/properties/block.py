"""A building block of random models: it takes hidden values [rows, LENGTH, WIDTH] to others.

A block is drawn as its name and a variant, a number whose digits choose its options. It knows which
of its parameters a plan cuts as tensor parallelism does; a block that does not is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from cg.tracer.values.plan import Sharding

WIDTH, HEADS, LENGTH, VOCABULARY = 8, 4, 4, 12

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    functional.relu,
    functional.gelu,
    lambda x: functional.gelu(x, approximate="tanh"),
    functional.silu,
    functional.elu,
    functional.selu,
    functional.celu,
    functional.leaky_relu,
    functional.softplus,
    functional.softsign,
    functional.mish,
    functional.hardswish,
    functional.hardsigmoid,
    functional.hardtanh,
    functional.relu6,
    functional.logsigmoid,
    functional.tanhshrink,
    functional.softshrink,
    functional.hardshrink,
    torch.tanh,
    torch.sigmoid,
    lambda x: functional.glu(torch.cat([x, x.sin()], -1)),
    lambda x: torch.square(functional.relu(x)),
    lambda x: functional.threshold(x, 0.1, 0.2),
)


def widened(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x if x.dtype == torch.float64 else x.float()


class Digits:
    """The options of a block, taken one after the other from a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def take(self, count: int) -> int:
        self.number, digit = divmod(self.number, count)
        return digit


BLOCKS: dict[str, type[Block]] = {}


class Block(nn.Module):
    """A block; `mask` is bool [rows, LENGTH], True in at least the first place of each row.

    Attributes:
        cuts: what tensor parallelism cuts, by the names of parameters.
    """

    cuts: ClassVar[Mapping[str, Sharding]] = {}

    def __init_subclass__(cls) -> None:
        BLOCKS[cls.__name__] = cls

    def __init__(self, digits: Digits) -> None:
        super().__init__()

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        raise NotImplementedError
