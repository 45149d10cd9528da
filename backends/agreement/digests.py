"""Digests of values: short, and equal on all ranks that hold equal values.

Tensors and arrays count by their bits, so `nan` equals `nan`, and `-0.0` differs from `0.0`. Plain
data counts by its value, also in containers and in the attributes of objects. A value that only one
process can hold, such as a function or a lock, counts by its type.
"""

from __future__ import annotations

import enum
import hashlib
import zlib
from collections import UserDict, deque
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, Final
from uuid import UUID

import numpy as np
import torch

_PLAIN: Final = (int, float, complex, bool, str, bytes, bytearray, type(None), slice, range)
_TORCH: Final = (torch.dtype, torch.Size, torch.layout, torch.memory_format)
_WRITTEN: Final = (date, time, timedelta, Decimal, Fraction, PurePath, UUID, np.generic)
"""Types whose `repr` shows the whole value."""
_CODE: Final = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)

_Seen = tuple[int, ...]
"""The `id` of each container that a value is in."""

_DEEPEST: Final = 64


def digest(value: object) -> int:
    """A digest of a value, of 32 bits. A tensor on a device is copied to the host for it."""
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    return zlib.crc32(_summary(value, ()))


def joined(digests: list[int]) -> int:
    """One digest of 64 bits, never 0, of the digests of several values."""
    return int.from_bytes(_hashed(repr(digests).encode()), "little") | 1


def _of_tensor(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return 0
    whole = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return zlib.crc32(whole.view(torch.uint8).numpy().data)


def _summary(value: Any, seen: _Seen) -> bytes:
    """A digest of a value, of 8 bytes."""
    kind = type(value).__qualname__
    if isinstance(value, enum.Enum):
        return _hashed(f"{kind}.{value.name}".encode())
    if isinstance(value, torch.Tensor):
        return _hashed(f"{value.dtype} {tuple(value.shape)} {_of_tensor(value)}".encode())
    if isinstance(value, (*_TORCH, *_WRITTEN)) or type(value) in _PLAIN:
        return _hashed(f"{kind} {value!r}".encode(errors="surrogatepass"))
    if isinstance(value, np.ndarray) and value.dtype != object:
        content = zlib.crc32(np.ascontiguousarray(value).view(np.uint8).data)
        return _hashed(f"{value.dtype} {value.shape} {content}".encode())
    if id(value) in seen or len(seen) > _DEEPEST or isinstance(value, (*_CODE, torch.device)):
        return _hashed(kind.encode())
    return _hashed(kind.encode() + b"".join(_parts(value, (*seen, id(value)))))


def _parts(value: Any, seen: _Seen) -> list[bytes]:
    """Digests of the parts of a container or an object; parts without an order are sorted."""
    if isinstance(value, (dict, UserDict, MappingProxyType)):
        return sorted(_summary(k, seen) + _summary(v, seen) for k, v in value.items())
    if isinstance(value, (set, frozenset)):
        return sorted(_summary(element, seen) for element in value)
    if isinstance(value, np.ndarray):
        return [_summary(element, seen) for element in value.reshape(-1)]
    in_order = isinstance(value, (list, tuple, deque))
    digests = [_summary(element, seen) for element in value] if in_order else []
    held = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for base in type(value).__mro__:
        slots = (name for name, at in vars(base).items() if isinstance(at, MemberDescriptorType))
        held |= {name: getattr(value, name, None) for name in slots}
    if is_dataclass(value):
        held |= {field.name: getattr(value, field.name, None) for field in fields(value)}
    return digests + sorted(name.encode() + _summary(part, seen) for name, part in held.items())


def _hashed(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()
