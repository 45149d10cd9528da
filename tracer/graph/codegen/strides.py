"""Lay out results whose real strides are not those of the trace, where that makes a difference.

A fake kernel guesses the strides of what an operator gives, and some guess wrong. A view that the
trace took of such a result may not exist, and a body returns what is contiguous. So the first run
of a body compares the results that views and returns depend on, and lays out those that differ. The
code that runs from then on lays out the same ones, and compares nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx

from ..autodiff.subgraphs import Piece, is_view, results, written_in_place

_ATEN = torch.ops.aten
_OF_STRIDES = frozenset(
    {
        *(_ATEN.view.default, _ATEN.view.dtype, _ATEN._unsafe_view.default),
        *(_ATEN.as_strided.default, _ATEN._reshape_alias.default),
        *(_ATEN.view_as_complex.default, _ATEN.view_as_real.default),
    }
)
"""Views that there are of some strides alone."""


def compared(piece: Piece) -> dict[fx.Node, tuple[int, ...]]:
    """The results of operators whose strides a piece depends on, with those of the trace."""
    graph = piece.graph
    needed = {n for n in results(graph)[: piece.returned + len(piece.rebinds)] if n is not None}
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
    """True if a node is what an operator has made, and it can lie in memory in several ways."""
    value = node.meta.get("val")
    if node.op != "call_function" or is_view(node) or not isinstance(value, torch.Tensor):
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
        return False
    return value.layout is torch.strided and sum(size > 1 for size in value.shape) > 1


def laid_out(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor, or a copy of it, with these strides where they tell elements apart."""
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
class Comparison:
    """The results that a first run has compared.

    Attributes:
        settle: takes the names of those that differ, when all have been compared.
        differing: these names.
    """

    settle: Callable[[frozenset[str]], None]
    differing: set[str] = field(default_factory=set)

    def compare(self, name: str, value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        """The result of this name, laid out as in the trace."""
        result = laid_out(value, strides)
        if result is not value:
            self.differing.add(name)
        return result

    def end(self) -> None:
        """All have been compared."""
        self.settle(frozenset(self.differing))
