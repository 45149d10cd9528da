"""Ports that carry a device's tensors by a transport of the host: through the host's memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ir.types import TensorType
from ..base import Port
from ..dtypes import TORCH_DTYPES
from ..poison import Poison
from .base import Device


class StagedPort:
    """A port of the host whose operand, or value, is a tensor on a device; see `Port`.

    `start` blocks the host until the operand is there to be copied. That asks for nothing that the
    program does not ask for on a host alone, where an operand is there before its op comes.

    Args:
        inner: the host's port.
        device: of this rank.
        operand: the type of a tensor that is to be sent, if one is. The host's memory for it is
            taken at once: a driver gives out such memory only when its device has nothing to do.
    """

    def __init__(self, inner: Port, device: Device, operand: TensorType | None) -> None:
        self._inner = inner
        self._device = device
        self._buffer: Tensor | None = None
        self.holds = True
        if operand is not None:
            like = torch.empty(operand.shape, dtype=TORCH_DTYPES[operand.dtype], device="meta")
            self._buffer = device.host_buffer(like)

    def start(self, value: Any) -> None:
        """See `Port`."""
        if self._buffer is None:
            self._inner.start(value)
            return
        self._buffer.copy_(value)
        self._inner.start(self._buffer)

    def fail(self, poison: Poison) -> None:
        """See `Port`."""
        self._inner.fail(poison)

    def poll(self) -> bool:
        """See `Port`."""
        return self._inner.poll()

    def take(self) -> Any:
        """See `Port`; the tensor is in memory of its own."""
        value = self._inner.take()
        if not isinstance(value, Tensor):
            return value
        return torch.empty_like(value, device=self._device.torch_device).copy_(value)

    def release(self) -> None:
        """See `Port`."""
        self._inner.release()
