"""Rules of convolutions, pooling and windows: rows and channels may be cut, pixels may not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from .....ir.layout import Layout, shape_of, volume
from ..cases import Answer, Case, Expansion, LocalOp, Rule, Shape, dim_of
from ..factors import Dims, Factors, each
from ..solution import solve
from .creation import zeros
from .pointwise import operand
from .views import moved, named

_ATEN = torch.ops.aten
_PIXELS = "has pixels, of which neighbours are needed"


def _dims(case: Case, result: tuple[int, ...]) -> tuple[Dims, Dims, Dims, dict[str, int]]:
    """The dimensions of the image, the weight and the result, and the sizes of the factors.

    There are `g` groups, each with `i` channels of the image and `o` channels of the result.
    """
    image, weight, groups = case["input"].shape, case["weight"].shape, case["groups"]
    sizes = {"n": image[0], "g": groups, "i": image[1] // groups, "o": result[1] // groups}
    for prefix, shape in (("p", image), ("k", weight), ("q", result)):
        sizes |= {f"{prefix}{d}": size for d, size in enumerate(shape)}

    def pixels(prefix: str) -> Dims:
        return tuple((f"{prefix}{d}",) for d in range(2, len(image)))

    image_dims: Dims = (("n",), ("g", "i"), *pixels("p"))
    outer, inner = (("g", "i"), ("o",)) if case["transposed"] else (("g", "o"), ("i",))
    return image_dims, (outer, inner, *pixels("k")), (("n",), ("g", "o"), *pixels("q")), sizes


def _keep(sizes: Mapping[str, int]) -> dict[str, str]:
    return {factor: _PIXELS for factor in sizes if factor[0] in "pkq"}


def _convolution(case: Case) -> Answer | Expansion:
    """A bias is added once: if the image's channels are cut, it is added to the sum."""
    image, weight, result, sizes = _dims(case, case.shape())
    has_bias = operand(case, "bias") is not None
    operands = (image, weight, *([(("g", "o"),)] if has_bias else []))
    linear = () if has_bias else each(0, 1)
    answer = solve(case, Factors(operands, (result,), sizes, linear, _keep(sizes)), local=_local)
    layout = answer.results[0]
    if has_bias and layout is not None and layout.summands:
        return Expansion(_with_bias)
    return answer


def _with_bias(
    *, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **others: Any
) -> torch.Tensor:
    convolved: torch.Tensor = _ATEN.convolution(input, weight, None, **others)
    return convolved + bias.view(-1, *(1 for _ in convolved.shape[2:]))


def _local(op: LocalOp) -> Any:
    """Run the op with the piece's number of groups; kernels take no empty piece."""
    weight, image = op.arguments["weight"].meta["val"].shape, shape_of(op.operands[0])
    if not math.prod(image) or not math.prod(weight):
        return zeros(op, op.arguments["input"])
    region = op.results[0]
    assert region is not None
    return op.run(groups=_groups(op, image, weight, shape_of(region)))


def _groups(op: LocalOp, image: Shape, weight: Shape, result: Shape) -> int:
    """The number of groups of a piece, from the channels of it and of one group."""
    groups: int = op.arguments["groups"]
    channels = result if op.arguments["transposed"] else image
    return groups if groups == 1 else channels[1] // weight[1]


def _convolution_backward(case: Case) -> Answer:
    image, weight, result, sizes = _dims(case, case["grad_output"].shape)
    mask = case["output_mask"]
    results = [
        dims if asked else None
        for asked, dims in zip(mask, (image, weight, (("g", "o"),)), strict=True)
    ]
    factors = Factors((result, image, weight), tuple(results), sizes, each(0), _keep(sizes))
    answer = solve(case, factors, local=_local_backward)
    bias = answer.results[2]
    if bias is None:
        return answer
    # The gradient of a bias does not depend on the image, whose cut channels leave no summands.
    channels = set(answer.wanted[1].cuts[1].axes)
    summands = tuple(axis for axis in bias.summands if axis not in channels)
    return replace(answer, results=(*answer.results[:2], Layout(bias.cuts, summands)))


def _local_backward(op: LocalOp) -> Any:
    regions = op.results
    if not all(map(volume, op.operands)):
        return _empty_backward(op)
    sizes = None if regions[2] is None else list(shape_of(regions[2]))
    result, image, weight = map(shape_of, op.operands)
    return op.run(bias_sizes=sizes, groups=_groups(op, image, weight, result))


def _empty_backward(op: LocalOp) -> Any:
    """The gradients if the image or the weight is empty: a bias still has one."""
    image, weight, bias = zeros(op, op.arguments["grad_output"])
    if bias is not None:
        grad = op.arguments["grad_output"]
        rest = [d for d in range(len(op.operands[0])) if d != 1]
        bias = op.emit(_ATEN.sum.dim_IntList, grad, rest)
    return image, weight, bias


def _local_pooling(op: LocalOp) -> Any:
    region = op.results[0]
    assert region is not None
    if all(map(volume, op.operands)):
        has_shape = "input_size" in op.arguments
        return op.run(input_size=list(shape_of(region))) if has_shape else op.run()
    first = next(value for value in op.arguments.values() if isinstance(value, fx.Node))
    return zeros(op, first)


def _pooling(case: Case, pixels: int = 2) -> Answer:
    """Rows and channels are the same in all operands and results; pixels have to be whole."""
    sizes: dict[str, int] = {}

    def dims(prefix: str, shape: tuple[int, ...]) -> Dims:
        batch = len(shape) - pixels
        names = (*(f"d{d}" for d in range(batch)), *(f"{prefix}{d}" for d in range(pixels)))
        sizes.update(zip(names, shape, strict=True))
        return tuple((name,) for name in names)

    operands = tuple(dims(f"p{i}_", o.shape) for i, o in enumerate(case.operands))
    results = tuple(dims(f"q{i}_", case.shape(i)) for i in range(len(case.shapes)))
    keep = {factor: _PIXELS for factor in sizes if factor[0] in "pq"}
    linear = each(0) if case.target in _LINEAR | _LINEAR_3D else ()
    return solve(case, Factors(operands, results, sizes, linear, keep), local=_local_pooling)


def _blocks(case: Case) -> Answer:
    """Blocks of pixels become columns, or columns blocks, for each row of the batch by itself."""
    operand_shape, result_shape = case.operands[0].shape, case.shape()
    batch: Dims = (("n",),) if max(len(operand_shape), len(result_shape)) == 4 else ()
    sizes = {"n": operand_shape[0]}

    def dims(prefix: str, shape: tuple[int, ...]) -> Dims:
        names = [f"{prefix}{d}" for d in range(len(batch), len(shape))]
        sizes.update(zip(names, shape[len(batch) :], strict=True))
        return (*batch, *((name,) for name in names))

    operands, results = (dims("p", operand_shape),), (dims("q", result_shape),)
    keep = {factor: _PIXELS for factor in sizes if factor != "n"}
    return solve(case, Factors(operands, results, sizes, each(0), keep), local=_local_pooling)


def _unfold(case: Case) -> Answer:
    shape = case.operands[0].shape
    windows = _windows(shape, dim_of(case["dimension"], len(shape)))
    dims = named(shape)
    keep = {dims[dim_of(case["dimension"], len(shape))][0]: "has windows taken along it"}
    return moved(case, dims, windows, keep)


def _windows(shape: Shape, dim: int) -> Dims:
    """The dimensions of windows: their number replaces dimension `dim`, their length is last."""
    dims = named(shape)
    return (*dims[:dim], ("n",), *dims[dim + 1 :], ("w",))


def _unfold_backward(case: Case) -> Answer:
    (grad,), result_shape = case.operands, case.shape()
    windows = _windows(result_shape, dim_of(case["dim"], len(result_shape)))
    sizes = {dim[0]: size for dim, size in zip(windows, grad.shape, strict=True)}
    sizes |= {f"d{i}": size for i, size in enumerate(result_shape)}
    keep = dict.fromkeys(("n", "w"), "is of windows")
    factors = Factors((windows,), (named(result_shape),), sizes, each(0), keep)
    return solve(case, factors, sizes={"input_sizes": 0})


_LINEAR: frozenset[object] = frozenset(
    {
        *(_ATEN.avg_pool2d.default, _ATEN._adaptive_avg_pool2d.default),
        *(_ATEN.avg_pool2d_backward.default, _ATEN._adaptive_avg_pool2d_backward.default),
        *(_ATEN.max_pool2d_with_indices_backward.default, _ATEN.upsample_nearest2d.default),
        *(_ATEN.adaptive_max_pool2d_backward.default, _ATEN.upsample_nearest2d_backward.default),
        *(_ATEN.upsample_bilinear2d.default, _ATEN.upsample_bilinear2d_backward.default),
        *(_ATEN.upsample_bicubic2d.default, _ATEN.upsample_bicubic2d_backward.default),
        *(_ATEN.reflection_pad2d.default, _ATEN.reflection_pad2d_backward.default),
        *(_ATEN.replication_pad2d.default, _ATEN.replication_pad2d_backward.default),
    }
)
_LINEAR_3D: frozenset[object] = frozenset(
    {
        *(_ATEN.avg_pool3d.default, _ATEN.avg_pool3d_backward.default),
        _ATEN.max_pool3d_with_indices_backward.default,
    }
)

RULES: Mapping[object, Rule] = {
    _ATEN.convolution.default: _convolution,
    _ATEN.convolution_backward.default: _convolution_backward,
    **dict.fromkeys(
        (
            *(*_LINEAR, _ATEN.max_pool2d_with_indices.default),
            _ATEN.adaptive_max_pool2d.default,
        ),
        _pooling,
    ),
    **dict.fromkeys(
        (*_LINEAR_3D, _ATEN.max_pool3d_with_indices.default), partial(_pooling, pixels=3)
    ),
    **dict.fromkeys((_ATEN.im2col.default, _ATEN.col2im.default), _blocks),
    _ATEN.unfold.default: _unfold,
    _ATEN.unfold_backward.default: _unfold_backward,
}
