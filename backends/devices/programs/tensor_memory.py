"""The memory of tensors: where it is, which of them share it, copies of many of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

TensorLocation = tuple[object, ...]
"""The place of a tensor's elements, and how they are read; its shape and type are known."""


def location(value: object) -> TensorLocation:
    """The location of a tensor; an empty one for any other value."""
    if not isinstance(value, Tensor):
        return ()
    return value.data_ptr(), value.stride(), value.is_conj(), value.is_neg()


def storage(tensor: Tensor) -> int:
    """The address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def storages(values: Sequence[object]) -> frozenset[int]:
    """The addresses of the storages of those values that are tensors."""
    return frozenset(storage(value) for value in values if isinstance(value, Tensor))


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy many tensors in one kernel."""
    if targets:
        torch._foreach_copy_(list(map(_signed, targets)), list(map(_signed, sources)))


def _signed(tensor: Tensor) -> Tensor:
    """The same bits in a type that torch can copy many tensors of in one kernel."""
    return tensor.view(_SIGNED[tensor.dtype]) if tensor.dtype in _SIGNED else tensor


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def like(values: Sequence[Tensor]) -> list[Tensor]:
    """New memory for each value, laid out as it is; values that share memory go on sharing it."""
    shared = Counter(map(storage, values))
    wholes: dict[int, Tensor] = {}
    made = []
    for value in values:
        at = storage(value)
        if shared[at] == 1:
            made.append(torch.empty_like(value))
            continue
        if at not in wholes:
            nbytes = value.untyped_storage().nbytes()
            wholes[at] = torch.empty(nbytes, dtype=torch.uint8, device=value.device)
        whole = wholes[at].untyped_storage()
        alias = torch.empty(0, dtype=value.dtype, device=value.device)
        made.append(alias.set_(whole, value.storage_offset(), value.shape, value.stride()))
    return made
