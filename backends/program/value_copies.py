"""Copy run-time values without sharing storage, and overwrite values that are freed.

A copy in the host's memory has the strides of its tensor: the bodies of backwards were traced with
them. So the copy is one of memory from the first element to the last. Where elements lie apart, so
that this is more memory than they have bytes, the copy is dense, and the tensor that comes back has
the strides again.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from ...ir.types import TensorType, UnitType, ValueType
from ..cpu.memory.objects import decode, encode
from ..poison import Poison


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


class HostCopy(NamedTuple):
    """A tensor in the memory of the host.

    Attributes:
        memory: its elements, in one dimension: those of its memory in order, or, where elements lie
            apart, in the order of its dimensions.
        shape, stride: of the tensor.
        is_dense: whether its memory has its elements and no others.
    """

    memory: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_dense: bool

    @staticmethod
    def of(tensor: Tensor, buffer: Tensor) -> HostCopy:
        """The place of a tensor's copy in a buffer of its type with as many elements."""
        stride = tensor.stride()
        return HostCopy(buffer, tuple(tensor.shape), stride, is_dense(tuple(tensor.shape), stride))

    def elements(self, tensor: Tensor) -> Tensor:
        """The elements of a tensor of this shape and stride, in the order of `memory`."""
        if self.is_dense:
            return tensor.as_strided((tensor.numel(),), (1,))
        return tensor

    @property
    def source(self) -> Tensor:
        """The memory, in the shape of `elements`."""
        return self.memory if self.is_dense else self.memory.view(self.shape)

    def room(self, device: torch.device | None) -> Tensor:
        """New memory for the tensor on a device."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.memory.dtype, device=device)


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """True if the elements of a tensor fill its memory without gaps, each once."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True


class HostCopyPort:
    """The port of a copy on a rank without a device; it implements `Port`.

    Both memories are those of the host. The copy is made at once.

    Args:
        is_to_host: its direction.
    """

    needs_release = False

    def __init__(self, is_to_host: bool) -> None:
        self._is_to_host = is_to_host
        self._value: Any = None

    def start(self, value: Any) -> None:
        """Copy the operand."""
        if self._is_to_host:
            copy = HostCopy.of(value, torch.empty(value.numel(), dtype=value.dtype))
            copy.source.copy_(copy.elements(value))
            self._value = copy
            return
        room = value.room(None)
        value.elements(room).copy_(value.source)
        self._value = room

    def fail(self, poison: Poison) -> NoReturn:
        """Raise the poison: what a copy copies, its rank has made."""
        raise poison

    def poll(self) -> bool:
        """True: the copy is made."""
        return True

    def take(self) -> Any:
        """The copy."""
        value, self._value = self._value, None
        return value

    def release(self) -> None:
        """Keep nothing."""
