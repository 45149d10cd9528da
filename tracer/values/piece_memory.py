"""The memory that is known to hold pieces of tensors that are cut."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...ir.layout import Layout


class PieceMemory:
    """Says of a tensor whether it is a piece, and how the whole is cut.

    Memory counts, not the tensor: `p.data` and `p.detach()` are as much a piece as `p` is. No
    memory is kept alive.
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
        """The layout of the whole that it is a piece of; None if it is no piece."""
        entry = self._held.get(memory_key(tensor))  # type: ignore[arg-type]
        return None if entry is None else entry[1]

    def forget_freed(self) -> None:
        """Forget memory that has been freed."""
        freed = [k for k, (held, _) in self._held.items() if held.expired()]  # type: ignore[no-untyped-call]
        for key in freed:
            del self._held[key]


def memory_key(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Where a tensor lies, which no other storage has while a weak reference to it is held.

    Gradients may lie behind each other in one storage.
    """
    if tensor.layout is not torch.strided:
        return None
    offset = int(tensor.storage_offset()) * tensor.element_size()
    return int(tensor.untyped_storage()._cdata), offset
