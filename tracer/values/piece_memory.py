"""Remember which memory holds pieces of tensors that are cut."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...ir.layout import Layout


class PieceMemory:
    """Knows which tensors are pieces, and how the logical tensors are cut.

    It goes by memory, not by tensor: `p.data` and `p.detach()` are pieces if `p` is one. It keeps
    no memory alive.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], tuple[StorageWeakRef, Layout]] = {}

    def note(self, tensor: torch.Tensor, layout: Layout) -> None:
        """Take note of a piece."""
        key = memory_key(tensor)
        if key is not None and key not in self._held:
            held = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._held[key] = held, layout

    def layout(self, tensor: torch.Tensor) -> Layout | None:
        """The layout of the logical tensor that a tensor is a piece of; None if it is no piece."""
        entry = self._held.get(memory_key(tensor))  # type: ignore[arg-type]
        return None if entry is None else entry[1]

    def forget_freed(self) -> None:
        """Forget memory that has been freed."""
        freed = [k for k, (held, _) in self._held.items() if held.expired()]  # type: ignore[no-untyped-call]
        for key in freed:
            del self._held[key]


def memory_key(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The storage of a tensor, and its offset there in bytes; None if it has no plain storage.

    The key is unique as long as somebody holds a weak reference to the storage. The offset tells
    gradients apart that lie one behind another in one storage.
    """
    if tensor.layout is not torch.strided:
        return None
    offset = int(tensor.storage_offset()) * tensor.element_size()
    return int(tensor.untyped_storage()._cdata), offset
