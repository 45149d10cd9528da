"""Make meshes: the ranks of a group as a grid with named axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...ir.types import Mesh, format_ranks


def mesh(ranks: Sequence[int] | None = None, /, **axes: int) -> Mesh:
    """Make a mesh; of the axes the last varies fastest.

    `mesh(dp=2, tp=4)` is ranks 0 to 7, and ranks 0 to 3 differ along `tp` alone; its
    `unbind("dp")` is two meshes of four ranks.

    Args:
        ranks: in the order of the grid; by default as many as there are, from 0.
        axes: their sizes, by name.

    Raises:
        ValueError: a size is not positive, there are no axes, or another number of ranks than the
            axes say, or a rank twice.
    """
    shown = "cg.mesh(" + ", ".join(f"{name}={size}" for name, size in axes.items()) + ")"
    if not axes:
        raise ValueError("a mesh needs at least one axis, as in cg.mesh(dp=2)")
    for name, size in axes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{shown}: axis {name} has size {size!r}; sizes are 1, 2, 3, ...")
    count = math.prod(axes.values())
    chosen = tuple(range(count)) if ranks is None else tuple(ranks)
    if len(chosen) != count:
        raise ValueError(
            f"{shown} is a grid of {count} ranks, and {len(chosen)} are given: {list(chosen)}"
        )
    return Mesh.of_grid(chosen, tuple(axes.items()))


def describe(mesh: Mesh) -> str:
    """A mesh in words, for messages: `the mesh dp=2, tp=4 of ranks {0..7}`."""
    axes = ", ".join(f"{name}={size}" for name, size in mesh.grid)
    return f"the mesh {axes} of ranks {format_ranks(mesh.ranks)}"
