"""Give results the strides of the trace, where it matters that their real strides differ.

A fake kernel guesses the strides of an operator's results, and some guess wrong. A view that the
trace took of such a result may be impossible for the real one, and a body has to return contiguous
tensors. So the first run of a body compares the results on which views and returns depend, and
copies those that differ into the strides of the trace. After that, the body runs code that copies
the same results, and compares nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx

from ..autodiff.subgraphs import Subgraph, is_view, results, written_in_place

_ATEN = torch.ops.aten
_OF_STRIDES = frozenset(
    {
        *(_ATEN.view.default, _ATEN.view.dtype, _ATEN._unsafe_view.default),
        *(_ATEN.as_strided.default, _ATEN._reshape_alias.default),
        *(_ATEN.view_as_complex.default, _ATEN.view_as_real.default),
    }
)
"""Views that are possible for some strides only."""


def compared(piece: Subgraph) -> dict[fx.Node, tuple[int, ...]]:
    """The results whose strides a piece depends on, with their strides in the trace."""
    graph = piece.graph
    needed = {n for n in results(graph)[: len(piece.gives) + len(piece.rebinds)] if n is not None}
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        base = written_in_place(node)
        if base is not None and node in needed:
            needed.add(base)
        elif is_view(node) and (node in needed or node.target in _OF_STRIDES):
            needed.add(node.args[0])
    return {n: n.meta["val"].stride() for n in graph.nodes if n in needed and _is_laid_out(n)}


def _is_laid_out(node: fx.Node) -> bool:
    """True if an operator has computed a node as a new tensor that may have several strides."""
    value = node.meta.get("val")
    if node.op != "call_function" or is_view(node) or not isinstance(value, torch.Tensor):
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
        return False
    return value.layout is torch.strided and sum(size > 1 for size in value.shape) > 1


def laid_out(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor with these strides: `value`, or a copy. Strides of dimensions of 1 may differ."""
    if _agree(value, strides):
        return value
    copy = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return copy.copy_(value)


def _agree(value: torch.Tensor, strides: tuple[int, ...]) -> bool:
    real = value.stride()
    if real == strides or len(real) != len(strides):
        return True
    triples = zip(value.shape, real, strides, strict=True)
    return value.numel() == 0 or all(size == 1 or a == b for size, a, b in triples)


@dataclass(eq=False)
class StrideComparison:
    """The comparison of results in the first run of a body.

    Attributes:
        settle: takes the names of the results that differ, when all have been compared.
        differing: these names, as far as results have been compared.
    """

    settle: Callable[[frozenset[str]], None]
    differing: set[str] = field(default_factory=set)

    def compare(self, name: str, value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        """The result with the strides of the trace; its name is noted if it had others."""
        result = laid_out(value, strides)
        if result is not value:
            self.differing.add(name)
        return result

    def end(self) -> None:
        """End the comparison: all results have been compared."""
        self.settle(frozenset(self.differing))
