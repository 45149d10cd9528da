"""Copies of run-time values that share nothing with the original, and values that are no more."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor

from ..ir.types import TensorType, UnitType, ValueType
from .errors import TransportError


def duplicate(value: Any, type_: ValueType) -> Any:
    """A copy of a value of type `type_` that shares nothing with it.

    Raises:
        TransportError: the value is an object that cannot be pickled.
    """
    if isinstance(type_, TensorType):
        return value.clone(memory_format=torch.contiguous_format)
    if isinstance(type_, UnitType):
        return None
    try:
        return pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    except Exception as error:
        raise TransportError(
            f"an object of type {type(value).__name__} cannot go to another rank, because it "
            f"cannot be pickled: {error}"
        ) from error


def spoil(value: Any) -> None:
    """Overwrite a tensor with what shows: NaN, the largest integer, or true."""
    if not isinstance(value, Tensor):
        return
    if value.is_floating_point() or value.is_complex():
        value.fill_(float("nan"))
    elif value.dtype is torch.bool:
        value.fill_(True)
    else:
        value.fill_(torch.iinfo(value.dtype).max)
