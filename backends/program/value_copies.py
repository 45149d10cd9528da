"""Copy run-time values without sharing storage, and overwrite values that are freed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...ir.types import TensorType, UnitType, ValueType
from ..cpu.memory.objects import decode, encode


def duplicate(value: Any, type_: ValueType) -> Any:
    """A copy of a value of type `type_` that shares nothing with it.

    Raises:
        TransportError: the value is an object that cannot be pickled.
    """
    if isinstance(type_, TensorType):
        return value.clone(memory_format=torch.contiguous_format)
    if isinstance(type_, UnitType):
        return None
    return duplicate_object(value)


def duplicate_object(value: Any) -> Any:
    """A copy of an object, just as another rank would get it.

    Raises:
        TransportError: it cannot be pickled.
    """
    encoded = encode(value)
    memory = np.empty(encoded.nbytes, dtype=np.uint8).data
    encoded.write(memory, 0, _copy)
    return decode(memory, 0, encoded.nbytes, private=True)


def _copy(target: memoryview, source: memoryview) -> None:
    target[:] = source


def overwrite(value: Any) -> None:
    """Overwrite a tensor with a value that shows: NaN, the largest integer, or true."""
    if not isinstance(value, Tensor):
        return
    if value.is_floating_point() or value.is_complex():
        value.fill_(float("nan"))
    elif value.dtype is torch.bool:
        value.fill_(True)
    else:
        value.fill_(torch.iinfo(value.dtype).max)
