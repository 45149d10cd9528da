"""Rules of normalizations. Normalized dimensions are whole; gradients of scales are sums over rows.

A batch norm takes statistics of the whole batch: ranks add up the sums over their rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .....ir.layout import shape_of
from ..cases import Answer, Case, Expansion, LocalOp, Operand, Rule, dim_of, whole
from ..factors import Dims, Factors, each
from ..solution import solve
from ..values.accumulation import accumulated
from .creation import zeros
from .pointwise import operand

_ATEN = torch.ops.aten
_SCALES = ("weight", "bias")


def _dims(
    value: Operand, normalized: int
) -> tuple[Dims, Dims, Dims, dict[str, int], dict[str, str]]:
    """The dimensions of the tensor, of its statistics and of scales; `sizes` and `keep`.

    Args:
        value: the tensor.
        normalized: the number of its last dimensions that are normalized.
    """
    rank = len(value.shape)
    dims: Dims = tuple((f"d{i}",) for i in range(rank))
    batch, inner = dims[: rank - normalized], dims[rank - normalized :]
    statistics = (*batch, *((),) * normalized)
    sizes = {f"d{i}": size for i, size in enumerate(value.shape)}
    keep = {dim[0]: "is normalized" for dim in inner}
    return dims, statistics, inner, sizes, keep


def _layer_norm(case: Case) -> Answer:
    """A norm by mean and deviation, or by the root of the mean square, with one statistic."""
    dims, statistics, inner, sizes, keep = _dims(case["input"], len(case["normalized_shape"]))
    scales = [inner for name in _SCALES if isinstance(case.arguments.get(name), Operand)]
    results = (dims, *[statistics] * (len(case.shapes) - 1))
    return solve(case, Factors((dims, *scales), results, sizes, (), keep))


def _layer_norm_backward(case: Case) -> Answer:
    dims, statistics, inner, sizes, keep = _dims(case["input"], len(case["normalized_shape"]))
    scales = [inner for name in _SCALES if isinstance(case.arguments.get(name), Operand)]
    mask = case["output_mask"]
    results = _asked(mask, (dims, *[inner] * (len(mask) - 1)))
    kept = [statistics for name in ("mean", "rstd") if name in case.arguments]
    operands = (dims, dims, *kept, *scales)
    return solve(case, Factors(operands, results, sizes, each(0), keep))


def _asked(mask: Sequence[bool], results: Sequence[Dims]) -> tuple[Dims | None, ...]:
    return tuple(dims if asked else None for asked, dims in zip(mask, results, strict=True))


def _group_norm(case: Case) -> Answer:
    """Rows may be cut, and so may groups of channels: a piece has fewer groups."""
    dims, sizes, keep = _image(case["input"], case["group"])
    scales = [(dims[1],) for name in _SCALES if operand(case, name) is not None]
    statistics = (dims[0], ("g",))
    factors = Factors((dims, *scales), (dims, statistics, statistics), sizes, (), keep)
    return solve(case, factors, local=_local_groups)


def _group_norm_backward(case: Case) -> Answer:
    dims, sizes, keep = _image(case["input"], case["group"])
    statistics = (dims[0], ("g",))
    scales = [(dims[1],)] if operand(case, "weight") is not None else []
    results = _asked(case["output_mask"], (dims, (dims[1],), (dims[1],)))
    operands = (dims, dims, statistics, statistics, *scales)
    return solve(case, Factors(operands, results, sizes, each(0), keep), local=_local_groups)


def _image(image: Operand, groups: int) -> tuple[Dims, dict[str, int], dict[str, str]]:
    sizes = {f"d{i}": size for i, size in enumerate(image.shape)}
    sizes |= {"g": groups, "k": image.shape[1] // groups}
    pixels: Dims = tuple((f"d{i}",) for i in range(2, len(image.shape)))
    keep = dict.fromkeys(("k", *(dim[0] for dim in pixels)), "is normalized")
    return (("d0",), ("g", "k"), *pixels), sizes, keep


def _local_groups(op: LocalOp) -> Any:
    shape, channels = shape_of(op.operands[0]), op.arguments["C"]
    groups = op.arguments["group"] * shape[1] // channels
    if not groups:
        return zeros(op, next(v for v in op.arguments.values() if isinstance(v, fx.Node)))
    dense = {n: _dense(op, v) for n, v in op.arguments.items() if isinstance(v, fx.Node)}
    return op.run(**dense, N=shape[0], C=shape[1], group=groups)


def _dense(op: LocalOp, value: fx.Node) -> fx.Node:
    """A contiguous piece, which the kernels take unasked: pieces have other strides than wholes."""
    if value.meta["val"].is_contiguous():
        return value
    return op.emit(_ATEN.clone.default, value, memory_format=torch.contiguous_format)


def _batch_norm(case: Case) -> Answer | Expansion:
    """In training, statistics are of the whole batch: sums over ranks if the batch is cut."""
    if not case["training"]:
        dims, sizes = _channels(case["input"])
        names = ("weight", "bias", "running_mean", "running_var")
        others = [(dims[1],) for name in names if operand(case, name) is not None]
        sizes["e"] = 0
        factors = Factors((dims, *others), (dims, (("e",),), (("e",),)), sizes)
        return solve(case, factors)
    if any(operand.layout.axes for operand in case.operands):
        _check_statistics(case)
        return Expansion(_batch_norm_written)
    return _on_copies(case)


def _new_statistics(case: Case) -> Answer | Expansion:
    """A batch norm in training that gives new running statistics, instead of writing to them."""
    if any(operand.layout.axes for operand in case.operands):
        return Expansion(_batch_norm_of)
    return _on_copies(case)


def _on_copies(case: Case) -> Answer:
    copies = tuple(operand.layout for operand in case.operands)
    return Answer(copies, tuple(None if s is None else whole(len(s)) for s in case.shapes))


def _check_statistics(case: Case) -> None:
    """Check that running statistics are cut as the channels are, since they are written in place.

    Raises:
        LayoutError: they are cut otherwise.
    """
    channels = case["input"].cuts[1]
    for name in ("running_mean", "running_var"):
        running = operand(case, name)
        if running is not None and running.cuts != (channels,):
            raise case.error(
                f"its channels are {'cut along ' + str(channels) if channels else 'whole'}, and "
                f"%{running.node.name}, which it updates, is not laid out like that",
                "give running_mean and running_var the cut of the channels in the plan",
            )


def _channels(image: Operand) -> tuple[Dims, dict[str, int]]:
    dims: Dims = tuple((f"d{i}",) for i in range(len(image.shape)))
    return dims, {f"d{i}": size for i, size in enumerate(image.shape)}


def _batch_norm_of(
    *,
    input: torch.Tensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """The output, the mean, the inverse deviation, and the new running statistics, if any."""
    rows = [i for i in range(input.dim()) if i != 1]
    count = input.numel() // max(input.shape[1], 1)
    wide = accumulated(input)
    mean = wide.sum(rows) / count
    centred = wide - _aside(mean, input)
    variance = centred.square().sum(rows) / count
    scale = (variance + eps).rsqrt()
    result = centred * _aside(scale, input)
    result = result if weight is None else result * _aside(weight, input)
    result = result if bias is None else result + _aside(bias, input)
    if running_mean is None:
        return result, mean, scale
    unbiased = variance * (count / max(count - 1, 1))
    new_mean = accumulated(running_mean) * (1 - momentum) + mean * momentum
    new_variance = accumulated(running_var) * (1 - momentum) + unbiased * momentum
    return result, mean, scale, new_mean, new_variance


def _batch_norm_written(*, running_mean: Any, running_var: Any, **arguments: Any) -> Any:
    result, mean, scale, *new = _batch_norm_of(
        running_mean=running_mean, running_var=running_var, **arguments
    )
    for running, value in zip((running_mean, running_var), new, strict=False):
        running.copy_(value)
    return result, mean, scale


def _aside(channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values of channels in a shape that broadcasts with an image."""
    return channels.view(-1, *(1 for _ in like.shape[2:]))


def _batch_norm_backward(case: Case) -> Answer | Expansion:
    if any(operand.layout.axes for operand in case.operands):
        return Expansion(_batch_norm_backward_of)
    return _on_copies(case)


def _batch_norm_backward_of(
    *,
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Any:
    rows = [i for i in range(input.dim()) if i != 1]
    count = input.numel() // max(input.shape[1], 1)
    mean = save_mean if train else running_mean
    scale = save_invstd if train else (accumulated(running_var) + eps).rsqrt()
    normed = (accumulated(input) - _aside(mean, input)) * _aside(scale, input)
    grad = accumulated(grad_out)
    total, along = grad.sum(rows), (grad * normed).sum(rows)
    if train:
        grad = grad - _aside(total / count, input) - normed * _aside(along / count, input)
    grad = grad * _aside(scale if weight is None else scale * weight, input)
    gradients = (grad, along, total)
    return tuple(v if asked else None for v, asked in zip(gradients, output_mask, strict=True))


def _weight_norm_backward(case: Case) -> Answer | Expansion:
    if any(operand.layout.axes for operand in case.operands):
        return Expansion(_weight_norm_backward_of)
    return _on_copies(case)


def _weight_norm_backward_of(
    *,
    grad_w: torch.Tensor,
    saved_v: torch.Tensor,
    saved_g: torch.Tensor,
    saved_norms: torch.Tensor,
    dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    others = [i for i in range(saved_v.dim()) if i != dim_of(dim, saved_v.dim())]
    grad, v, norms = accumulated(grad_w), accumulated(saved_v), accumulated(saved_norms)
    along = (grad * v).sum(others, keepdim=True) / norms
    return (grad - v * (along / norms)) * (accumulated(saved_g) / norms), along


RULES: Mapping[object, Rule] = {
    _ATEN.native_layer_norm.default: _layer_norm,
    _ATEN.native_layer_norm_backward.default: _layer_norm_backward,
    _ATEN._fused_rms_norm.default: _layer_norm,
    _ATEN._fused_rms_norm_backward.default: _layer_norm_backward,
    _ATEN.native_batch_norm.default: _batch_norm,
    _ATEN._native_batch_norm_legit_functional.default: _new_statistics,
    _ATEN.native_batch_norm_backward.default: _batch_norm_backward,
    _ATEN._weight_norm_interface_backward.default: _weight_norm_backward,
    _ATEN.native_group_norm.default: _group_norm,
    _ATEN.native_group_norm_backward.default: _group_norm_backward,
}
