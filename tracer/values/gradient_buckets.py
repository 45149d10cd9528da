"""Set the gradients of parameters, and put those of an actor on a mesh into buckets.

Buckets are reduced one by one. A backward is cut at its buckets, so that one is reduced while the
rest of the backward runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from ...ir.layout import WHOLE, Layout
from .actor_state import StateTensor


def set_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set `.grad` of a parameter; the parameter may rest on another device.

    Torch compares devices when `.grad` is set, and not when the data of a parameter are replaced.
    """
    if gradient is None or gradient.device == parameter.device:
        parameter.grad = gradient
        return
    at_rest, parameter.data = parameter.data, gradient.detach()
    try:
        parameter.grad = gradient
    finally:
        parameter.data = at_rest


BUCKET = 25 << 20
"""The most bytes of a bucket on each rank, unless one gradient is larger; the same as in DDP."""


@dataclass(frozen=True)
class GradientLayout:
    """How ranks hold what backwards add to one gradient.

    Attributes:
        layout: its layout; it must be reduced along the axes of its summands.
        bucket: the number of its bucket.
    """

    layout: Layout
    bucket: int = 0


@dataclass
class Buckets:
    """The buckets of one actor in one step.

    A gradient comes into a bucket when the first backward that adds to it is derived, in the order
    in which that backward has its gradients. So all ranks make the same buckets.

    Attributes:
        limit: the most bytes of a bucket, unless one gradient is larger.
        of: the bucket of each gradient, by path.
    """

    limit: int = BUCKET
    of: dict[str, int] = field(default_factory=dict)
    _last: int = 0
    _nbytes: int = 0

    def enter(self, gradients: Iterable[tuple[str, int]]) -> None:
        """Put gradients into buckets, except those that are in one already.

        Args:
            gradients: paths with bytes on each rank, in the order in which a backward has them.
        """
        for path, nbytes in gradients:
            if path in self.of:
                continue
            if self._nbytes and self._nbytes + nbytes > self.limit:
                self._last, self._nbytes = self._last + 1, 0
            self.of[path] = self._last
            self._nbytes += nbytes


def whole_gradients(tensors: Iterable[StateTensor]) -> dict[str, GradientLayout]:
    """The layouts of the gradients of tensors, by path, if every rank adds the same to them."""
    return {
        tensor.path: GradientLayout(Layout((WHOLE,) * tensor.tensor.dim())) for tensor in tensors
    }


def buckets_of(paths: Iterable[str], buckets: Mapping[str, int]) -> tuple[int, ...]:
    """The buckets of some gradients, ascending, as `Function.buckets` names them."""
    numbers = sorted({buckets.get(path, 0) for path in paths})
    return () if numbers == [0] else tuple(numbers)
