"""Tensors that lie one behind the other in one piece of the host's memory, for a single copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

PinnedMemory = Callable[[int], torch.Tensor]
"""Takes so many bytes of the host that its device can copy to and from: u8[n]."""

_ALIGNED = 256
"""Tensors begin at multiples of so many bytes, as torch's allocator has it."""


@dataclass(frozen=True, slots=True)
class PinnedPlace:
    """The place of a tensor in a piece of memory.

    Attributes:
        start: its first byte.
        like: the outline of the tensor.
        numel: the number of elements that the place has room for.
    """

    start: int
    like: torch.Tensor
    numel: int

    @property
    def end(self) -> int:
        """The first byte behind it at which another tensor may begin."""
        size = self.numel * self.like.element_size()
        return self.start + -(-size // _ALIGNED) * _ALIGNED

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in a memory, u8[n], from its beginning.

        Its storage is that part of the memory: `torch.save` writes storages as a whole, and none
        that has tensors of several types.
        """
        like = self.like
        start = memory.storage_offset() + self.start
        part = memory.untyped_storage()[start : start + like.numel() * like.element_size()]
        empty = torch.empty(0, dtype=like.dtype, device=memory.device)
        return empty.set_(part, 0, like.shape, like.stride())

    def fits(self, value: object) -> bool:
        """True if a value is a tensor that may lie there."""
        like = self.like
        return (
            isinstance(value, torch.Tensor)
            and (value.shape, value.dtype) == (like.shape, like.dtype)
            and value.layout is torch.strided
        )

    def flat(self, memory: torch.Tensor) -> torch.Tensor:
        """All elements that the place has room for, in one dimension."""
        size = self.numel * self.like.element_size()
        return memory[self.start : self.start + size].view(self.like.dtype)


Key: TypeAlias = tuple[int, int, str]
"""The optimizer by its id, or 0; the parameter by its id; and the optimizer's key, or ""."""


class PinnedPiece:
    """Tensors that lie one behind the other in one piece of the host's memory.

    Attributes:
        places: the place of each tensor.
        size: the bytes of the memory.
    """

    def __init__(self, pinned: PinnedMemory) -> None:
        self.places: dict[Key, PinnedPlace] = {}
        self.size = 0
        self._pinned = pinned
        self._memory: torch.Tensor | None = None

    @property
    def memory(self) -> torch.Tensor:
        """The memory, u8[n]."""
        assert self._memory is not None, "a step that uses the state has been traced"
        return self._memory

    def lay_out(self, tensors: Iterable[tuple[Key, torch.Tensor, int]]) -> None:
        """Find a place for each tensor, and take the memory for all.

        Args:
            tensors: the key, outline and room of each.
        """
        places: dict[Key, PinnedPlace] = {}
        end = 0
        for key, like, numel in tensors:
            place = places[key] = PinnedPlace(end, like, numel)
            end = place.end
        if self._memory is None or _outline(places) != _outline(self.places):
            self._memory = self._pinned(end).zero_()  # what lies elsewhere goes over at its use
        self.places, self.size = places, end


def _outline(places: dict[Key, PinnedPlace]) -> list[tuple[Any, ...]]:
    return [
        (key, place.start, place.end, place.like.shape, place.like.stride(), place.like.dtype)
        for key, place in places.items()
    ]
