"""Rules of products of matrices: a contracted dimension that is cut leaves summands."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ..cases import Answer, Case, Expansion, Operand, Rule
from ..factors import Factors, each, jointly, letters, sizes_of, solve
from .pointwise import broadcast

_ATEN = torch.ops.aten

_PRODUCTS = {
    _ATEN.mm.default: "mk,kn->mn",
    _ATEN.bmm.default: "bmk,bkn->bmn",
    _ATEN.mv.default: "mk,k->m",
    _ATEN.dot.default: "k,k->",
}

_SUMS_WITH_PRODUCTS = {
    _ATEN.addmm.default: ("mk,kn->mn", _ATEN.mm.default, ("mat1", "mat2")),
    _ATEN.baddbmm.default: ("bmk,bkn->bmn", _ATEN.bmm.default, ("batch1", "batch2")),
    _ATEN.addmv.default: ("mk,k->m", _ATEN.mv.default, ("mat", "vec")),
}


def _product(text: str, case: Case) -> Answer:
    given, made = letters(text)
    sizes = sizes_of(given, [operand.shape for operand in case.operands])
    return solve(case, Factors(given, made, sizes, each(0, 1)))


def _sum_with_product(
    text: str, product: Any, names: tuple[str, str], case: Case
) -> Answer | Expansion:
    """A bias is added once: where the product gives summands, to their sum."""
    one, other = (case[name] for name in names)
    if _gives_summands(one, other, text):
        return Expansion(partial(_apart, product, names))
    given, made = letters(text)
    (result,) = made
    (bias,), _ = broadcast([case["self"].shape], case.shape())
    renamed = {f"d{i}": dim for i, dim in enumerate(result)}
    dims = tuple(renamed[dim[0]] if dim else () for dim in bias)
    shapes = [one.shape, other.shape]
    linear = (*jointly(0, 1), *jointly(0, 2))
    return solve(case, Factors((dims, *given), made, sizes_of(given, shapes), linear))


def _gives_summands(one: Operand, other: Operand, text: str) -> bool:
    """True if a contracted dimension is cut, or a factor is a summand."""
    if one.layout.summands or other.layout.summands:
        return True
    (first, second), (result,) = letters(text)
    pairs = [*zip(first, one.cuts, strict=True), *zip(second, other.cuts, strict=True)]
    return any(cut and dim not in result for dim, cut in pairs)


def _apart(
    product: Any,
    names: tuple[str, str],
    *,
    self: torch.Tensor,
    beta: float,
    alpha: float,
    **given: Any,
) -> torch.Tensor:
    found: torch.Tensor = product(given[names[0]], given[names[1]])
    scaled = found if alpha == 1 else found * alpha
    return scaled + (self if beta == 1 else self * beta)


RULES: Mapping[object, Rule] = {
    **{op: partial(_product, text) for op, text in _PRODUCTS.items()},
    **{op: partial(_sum_with_product, *row) for op, row in _SUMS_WITH_PRODUCTS.items()},
}
