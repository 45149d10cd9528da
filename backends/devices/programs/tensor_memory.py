"""The memory of tensors: locations, storages, layouts, and copies of many tensors at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TensorLocation = tuple[object, ...]
"""The address of a tensor's elements, and how they are read; shape and type are not part of it."""


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


def set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Set `.grad` of a parameter; the parameter may rest in the memory of the host.

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


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy many tensors in one kernel."""
    if targets:
        torch._foreach_copy_(list(map(_signed, targets)), list(map(_signed, sources)))


def _signed(tensor: Tensor) -> Tensor:
    """The same bits in a type whose tensors torch copies in one kernel."""
    return tensor.view(_SIGNED[tensor.dtype]) if tensor.dtype in _SIGNED else tensor


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """How a tensor lies in memory; a layout holds no memory.

    Attributes:
        whole: the address of the storage; tensors with the same address share it.
        nbytes: of the storage.
    """

    whole: int
    nbytes: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def layouts(values: Sequence[Tensor]) -> list[MemoryLayout]:
    """The layout of each value; one that shares its memory with no other is laid out densely."""
    shared = Counter(map(storage, values))
    tensor_layouts = []
    for value in values:
        whole, offset = value, value.storage_offset()
        if shared[storage(value)] == 1:
            whole, offset = torch.empty_like(value, device="meta"), 0
        nbytes, strides = whole.untyped_storage().nbytes(), whole.stride()
        place = storage(value), nbytes, int(offset)
        tensor_layouts.append(MemoryLayout(*place, value.shape, strides, value.dtype, value.device))
    return tensor_layouts


def laid_out(layouts: Sequence[MemoryLayout]) -> list[Tensor]:
    """New tensors of zeros with these layouts; tensors of one storage share memory again."""
    wholes: dict[int, Tensor] = {}
    tensors = []
    for layout in layouts:
        if layout.whole not in wholes:
            wholes[layout.whole] = torch.zeros(
                layout.nbytes, dtype=torch.uint8, device=layout.device
            )
        memory = wholes[layout.whole].untyped_storage()
        alias = torch.empty(0, dtype=layout.dtype, device=layout.device)
        tensors.append(alias.set_(memory, layout.offset, layout.shape, layout.stride))
    return tensors
