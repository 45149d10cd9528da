"""Rules of normalizations: what is normalized is whole; gradients of scales are sums over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....ir.layout import shape_of
from ..cases import Answer, Case, LocalOp, Operand, Rule
from ..factors import Dims, Factors, each, solve
from .pointwise import operand

_ATEN = torch.ops.aten


def _dims(
    given: Operand, normalized: int
) -> tuple[Dims, Dims, Dims, dict[str, int], dict[str, str]]:
    """Dimensions of the tensor, of its statistics and of scales; sizes; what is whole."""
    rank = len(given.shape)
    dims: Dims = tuple((f"d{i}",) for i in range(rank))
    batch, inner = dims[: rank - normalized], dims[rank - normalized :]
    statistics = (*batch, *((),) * normalized)
    sizes = {f"d{i}": size for i, size in enumerate(given.shape)}
    keep = {dim[0]: "is normalized" for dim in inner}
    return dims, statistics, inner, sizes, keep


def _layer_norm(case: Case) -> Answer:
    dims, statistics, inner, sizes, keep = _dims(case["input"], len(case["normalized_shape"]))
    scales = [inner for name in ("weight", "bias") if operand(case, name) is not None]
    results = (dims, statistics, statistics)
    return solve(case, Factors((dims, *scales), results, sizes, (), keep))


def _layer_norm_backward(case: Case) -> Answer:
    dims, statistics, inner, sizes, keep = _dims(case["input"], len(case["normalized_shape"]))
    scales = [inner for name in ("weight", "bias") if operand(case, name) is not None]
    results = _asked(case["output_mask"], (dims, inner, inner))
    operands = (dims, dims, statistics, statistics, *scales)
    return solve(case, Factors(operands, results, sizes, each(0), keep))


def _rms_norm(case: Case) -> Answer:
    dims, statistics, inner, sizes, keep = _dims(case["input"], len(case["normalized_shape"]))
    scales = [inner] if operand(case, "weight") is not None else []
    return solve(case, Factors((dims, *scales), (dims, statistics), sizes, (), keep))


def _rms_norm_backward(case: Case) -> Answer:
    dims, statistics, inner, sizes, keep = _dims(case["input"], len(case["normalized_shape"]))
    scales = [inner] if operand(case, "weight") is not None else []
    results = _asked(case["output_mask"], (dims, inner))
    return solve(case, Factors((dims, dims, statistics, *scales), results, sizes, each(0), keep))


def _asked(mask: Sequence[bool], results: Sequence[Dims]) -> tuple[Dims | None, ...]:
    return tuple(dims if asked else None for asked, dims in zip(mask, results, strict=True))


def _group_norm(case: Case) -> Answer:
    """Rows may be cut; `N` is their number in a piece."""
    dims, sizes, keep = _image(case["input"])
    scales = [(dims[1],) for name in ("weight", "bias") if operand(case, name) is not None]
    statistics = (dims[0], ("g",))
    factors = Factors((dims, *scales), (dims, statistics, statistics), sizes, (), keep)
    return solve(case, factors, local=_local_rows)


def _group_norm_backward(case: Case) -> Answer:
    dims, sizes, keep = _image(case["input"])
    statistics = (dims[0], ("g",))
    scales = [(dims[1],)] if operand(case, "weight") is not None else []
    results = _asked(case["output_mask"], (dims, (dims[1],), (dims[1],)))
    operands = (dims, dims, statistics, statistics, *scales)
    return solve(case, Factors(operands, results, sizes, each(0), keep), local=_local_rows)


def _image(given: Operand) -> tuple[Dims, dict[str, int], dict[str, str]]:
    dims: Dims = tuple((f"d{i}",) for i in range(len(given.shape)))
    sizes = {f"d{i}": size for i, size in enumerate(given.shape)} | {"g": 1}
    return dims, sizes, {dim[0]: "is normalized" for dim in dims[1:]}


def _local_rows(op: LocalOp) -> Any:
    return op.run(N=shape_of(op.operands[0])[0])


RULES: Mapping[object, Rule] = {
    _ATEN.native_layer_norm.default: _layer_norm,
    _ATEN.native_layer_norm_backward.default: _layer_norm_backward,
    _ATEN._fused_rms_norm.default: _rms_norm,
    _ATEN._fused_rms_norm_backward.default: _rms_norm_backward,
    _ATEN.native_group_norm.default: _group_norm,
    _ATEN.native_group_norm_backward.default: _group_norm_backward,
}
