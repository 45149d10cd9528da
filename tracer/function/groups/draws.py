"""Random numbers of opaque methods on a mesh, which have to be the same on all of its ranks.

If a method draws from its process's own generator, each rank draws other numbers, and copies drift
apart. If all ranks seed a generator alike, they draw the same numbers. That is right for a tensor
that every rank has a copy of, and wrong for a tensor that is cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ....ir.layout import Layout
from ...values.operators import written_values
from ...values.pieces import memory_key

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
    """True if a random operator gets a generator other than the process's default generators."""
    # Operators get a new Python object for the caller's generator; `_cdata` is the same for both.
    process = (torch.default_generator, *torch.cuda.default_generators)
    known = {generator._cdata for generator in process}  # type: ignore[attr-defined]
    generators = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)]
    return any(generator._cdata not in known for generator in generators)  # type: ignore[attr-defined]


class Drawn:
    """The tensors whose entries were drawn in a call, or computed elementwise from drawn entries.

    The whole tensor counts as drawn, as a rank may need any part of it for its piece.
    """

    def __init__(self) -> None:
        # While there is a weak reference to a storage, no other storage gets its address.
        self._held: dict[tuple[object, int], StorageWeakRef] = {}

    def __contains__(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and _key(value) in self._held

    def note(self, value: object) -> None:
        """Note the results of an operator that draws."""
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                self._held[_key(tensor)] = reference

    def follow(self, func: object, args: Any, kwargs: Any, result: object) -> None:
        """Note an operator's results that have as many entries as a drawn operand."""
        if not self._held:
            return
        sizes = {value.numel() for value in tree_leaves((args, kwargs)) if value in self}
        leaves = tree_leaves((result, [*written_values(func, args, kwargs)]))
        self.note([v for v in leaves if isinstance(v, torch.Tensor) and v.numel() in sizes])

    def differ(self, value: object, layout: Layout) -> bool:
        """True if a tensor was drawn, and ranks need different entries of it for their pieces."""
        if value not in self or not isinstance(value, torch.Tensor):
            return False
        dims = zip(reversed(value.shape), reversed(layout.cuts), strict=False)
        return any(cut and size > 1 for size, cut in dims)


def _key(tensor: torch.Tensor) -> tuple[object, int]:
    return memory_key(tensor), tensor.numel()
