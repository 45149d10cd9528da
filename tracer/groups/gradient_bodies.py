"""Bodies that work on gradients, and say whose: a device has to know before it replays them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..functions.interface import Body


@dataclass(frozen=True)
class GradientBody:
    """The body of a function that reads or writes gradients and no other state.

    Attributes:
        body: what it does.
        state: gives nothing: values of parameters stay as they are.
        trained: gives the parameters on whose `.grad` it works.
        rebinds: False: it puts nothing in the place of buffers.
    """

    body: Body
    state: Callable[[], Sequence[torch.Tensor]]
    trained: Callable[[], Sequence[torch.Tensor]]
    rebinds: bool = False

    @staticmethod
    def of(body: Body, tensors: Sequence[torch.Tensor]) -> GradientBody:
        """The body, of the gradients of some parameters."""
        return GradientBody(body, lambda: (), lambda: tensors)

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        return self.body(*inputs)
