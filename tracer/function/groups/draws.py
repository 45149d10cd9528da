"""Random numbers of opaque methods on a mesh, which have to be the same on all of its ranks.

A method that draws from its process's own generator draws other numbers on each rank, and copies
drift apart. With a generator that all ranks seed alike, they draw the same numbers: right for a
tensor of which each has a copy, and wrong for one that is cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ....ir.layout import Layout
from ...values.operators import written_values
from ...values.piece_memory import memory_key

GENERATOR_REMEDY = (
    "keep a generator in the actor that all ranks seed alike, "
    "self.noise = torch.Generator().manual_seed(0) in its constructor, and draw with "
    "generator=self.noise; a DataLoader takes generator=, too. Or draw in a traced method, whose "
    "numbers are the same on all ranks"
)
PIECE_REMEDY = (
    "draw in a traced method, where each rank gets its part of what one process draws: write to a "
    "buffer that the plan cuts as this tensor, self.noise.normal_(), and read the buffer here; or "
    "leave the tensor whole"
)


def takes_own_generator(args: Any, kwargs: Any) -> bool:
    """True if a random operator is given a generator that is not one of the process's own."""
    # An operator is given another object of Python for the generator that its caller has named.
    process = (torch.default_generator, *torch.cuda.default_generators)
    known = {generator._cdata for generator in process}  # type: ignore[attr-defined]
    generators = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)]
    return any(generator._cdata not in known for generator in generators)  # type: ignore[attr-defined]


class Drawn:
    """The tensors whose entries were drawn in a call, or were made of such entries one by one.

    All of a tensor counts: a part of it may be what a rank needs for its piece.
    """

    def __init__(self) -> None:
        # A storage that is referred to weakly keeps its address to itself.
        self._held: dict[tuple[object, int], StorageWeakRef] = {}

    def __contains__(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and _key(value) in self._held

    def note(self, value: object) -> None:
        """Take note of what is made by an operator that draws."""
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                self._held[_key(tensor)] = reference

    def follow(self, func: object, args: Any, kwargs: Any, result: object) -> None:
        """Take note of what an operator makes of drawn tensors: as many entries as they have."""
        if not self._held:
            return
        sizes = {value.numel() for value in tree_leaves((args, kwargs)) if value in self}
        leaves = tree_leaves((result, [*written_values(func, args, kwargs)]))
        self.note([v for v in leaves if isinstance(v, torch.Tensor) and v.numel() in sizes])

    def differ(self, value: object, layout: Layout) -> bool:
        """True if a tensor was drawn, and ranks need other entries of it for their pieces."""
        if value not in self or not isinstance(value, torch.Tensor):
            return False
        dims = zip(reversed(value.shape), reversed(layout.cuts), strict=False)
        return any(cut and size > 1 for size, cut in dims)


def _key(tensor: torch.Tensor) -> tuple[object, int]:
    return memory_key(tensor), tensor.numel()
