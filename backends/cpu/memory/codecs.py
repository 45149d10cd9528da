"""Codecs: values of each IR type as the bytes of a message."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ....ir.types import DType, ObjectType, TensorType, ValueType
from ...dtypes import TORCH_DTYPES, describe
from ...errors import TransportError
from .objects import Encoded, decode, encode
from .parallel_memcpy import LEAST, Copier


class Codec(Protocol):
    """Reads and writes the values of one type.

    Attributes:
        nbytes: bytes of every message; None where they depend on the value.
    """

    nbytes: int | None

    def prepare(self, value: Any) -> tuple[Any, int]:
        """Return what is to be written for `value`, and its number of bytes.

        Raises:
            TransportError: the value is not of the type, or cannot be pickled.
        """

    def keep(self, prepared: Any) -> Any:
        """A copy of what `prepare` returned, so that the value may change."""

    def write(self, prepared: Any, target: memoryview, at: int) -> None:
        """Write what `prepare` returned at byte `at`."""

    def view(self, source: memoryview, at: int, nbytes: int, private: bool) -> Any:
        """The value of the message at byte `at`.

        A tensor shares the memory. An object does so only if `private` says that nobody will
        overwrite it.
        """


class TensorCodec:
    """Tensors of one dtype and shape, stored contiguously. Each message has a codec of its own.

    Args:
        copier: copies tensors that are large.

    Attributes:
        is_large: whether several threads copy them; only then is `write_large` worth a call.
    """

    def __init__(self, type_: TensorType, copier: Copier) -> None:
        self._copier = copier
        self.dtype = TORCH_DTYPES[type_.dtype]
        self.shape = torch.Size(type_.shape)
        self.nbytes: int | None = type_.nbytes
        self.is_large = type_.nbytes >= LEAST
        self._type = type_
        self._views: dict[int, tuple[memoryview, Tensor]] = {}

    def prepare(self, value: Any) -> tuple[Tensor, int]:
        if (
            not isinstance(value, Tensor)
            or value.dtype is not self.dtype
            or value.shape != self.shape
        ):
            raise TransportError(
                f"a message of type {self._type} cannot carry {describe(value)}: the plan fixed "
                "the type when the step was compiled"
            )
        assert self.nbytes is not None
        return (value.detach() if value.requires_grad else value), self.nbytes

    def keep(self, prepared: Tensor) -> Tensor:
        return prepared.clone()

    def write(self, prepared: Tensor, target: memoryview, at: int) -> None:
        if not (self.is_large and self.write_large(prepared, target, at)):
            self.view(target, at, 0, False).copy_(prepared)

    def write_large(self, prepared: Tensor, target: memoryview, at: int) -> bool:
        """Write a large tensor, if it is contiguous and on the host; return whether it is."""
        if not prepared.is_contiguous() or prepared.device.type != "cpu":
            return False
        source = self.contiguous_bytes(prepared)
        self._copier.copy(target[at : at + source.nbytes], source)
        return True

    def view(self, source: memoryview, at: int, nbytes: int, private: bool) -> Tensor:
        known = self._views.get(at)
        if known is not None and known[0] is source:
            return known[1]
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        count = self.shape.numel()
        view = torch.frombuffer(source, dtype=self.dtype, count=count, offset=at)
        if len(self.shape) != 1:
            view = view.view(self.shape)
        if not private:  # its slot will be used again
            self._views[at] = (source, view)
        return view

    def contiguous_bytes(self, prepared: Tensor) -> memoryview:
        """The bytes of the tensor: its own memory where that is contiguous, else a copy."""
        plain = prepared.resolve_conj().resolve_neg().contiguous().cpu()
        return plain.view(-1).view(torch.uint8).numpy().data


class RowsCodec:
    """Some rows of a matrix, as many as the message has; what is written is a pair of both.

    Args:
        dtype: the type of the matrix.
    """

    nbytes: int | None = None

    def __init__(self, dtype: DType) -> None:
        self._dtype = TORCH_DTYPES[dtype]
        self._size = dtype.itemsize

    def prepare(self, value: Any) -> tuple[tuple[Tensor, Tensor], int]:
        matrix, rows = value
        if matrix.dtype is not self._dtype:
            raise TransportError(f"a message of rows of {self._dtype} has {describe(matrix)}")
        return (matrix.detach(), rows), len(rows) * matrix.shape[1] * self._size

    def keep(self, prepared: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        matrix, rows = prepared
        return matrix.clone(), rows

    def write(self, prepared: tuple[Tensor, Tensor], target: memoryview, at: int) -> None:
        matrix, rows = prepared
        count = len(rows) * matrix.shape[1]
        if count:
            flat = torch.frombuffer(target, dtype=self._dtype, count=count, offset=at)
            torch.index_select(matrix, 0, rows, out=flat.view(len(rows), -1))

    def view(self, source: memoryview, at: int, nbytes: int, private: bool) -> Tensor:
        """The entries of all rows, in one dimension."""
        count = nbytes // self._size
        if not count:
            return torch.empty(0, dtype=self._dtype)
        return torch.frombuffer(source, dtype=self._dtype, count=count, offset=at)


class ObjectCodec:
    """Any Python object, pickled.

    Args:
        copier: copies its bulk data.
    """

    nbytes: int | None = None

    def __init__(self, copier: Copier) -> None:
        self._copy = copier.copy

    def prepare(self, value: Any) -> tuple[Encoded, int]:
        encoded = encode(value)
        return encoded, encoded.nbytes

    def keep(self, prepared: Encoded) -> Encoded:
        prepared.keep()
        return prepared

    def write(self, prepared: Encoded, target: memoryview, at: int) -> None:
        prepared.write(target, at, self._copy)

    def view(self, source: memoryview, at: int, nbytes: int, private: bool) -> Any:
        return decode(source, at, nbytes, private)


class UnitCodec:
    """The unit: a message without content."""

    nbytes: int | None = 0

    def prepare(self, value: Any) -> tuple[None, int]:
        return None, 0

    def keep(self, prepared: None) -> None:
        return None

    def write(self, prepared: None, target: memoryview, at: int) -> None:
        return None

    def view(self, source: memoryview, at: int, nbytes: int, private: bool) -> None:
        return None


def codec_of(type_: ValueType, copier: Copier) -> TensorCodec | ObjectCodec | UnitCodec:
    """The codec of an IR type."""
    if isinstance(type_, TensorType):
        return TensorCodec(type_, copier)
    return ObjectCodec(copier) if isinstance(type_, ObjectType) else UnitCodec()
