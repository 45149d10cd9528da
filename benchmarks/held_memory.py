"""Count the bytes of tensors that operators make, as long as they live."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldMemory(TorchDispatchMode):
    """Counts the bytes that tensors hold whose memory operators have made under this mode.

    Attributes:
        live: the bytes now.
        peak: the most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        operands = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _is_plain(t)}
        for tensor in tree_leaves(results):
            if _is_plain(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known and storage._cdata not in operands:
                    self._note(storage)
        return results

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
