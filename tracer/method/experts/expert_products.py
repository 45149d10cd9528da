"""Products of tokens with the matrices of their experts, forward and backward.

A mixture of experts sends each token to a few of its experts. Tokens of one expert lie apart, and
how many there are depends on the data. The operators here take tokens in any order, with the
numbers of their experts, and all their shapes are static. Inside, rows are sorted by expert, and
one product is computed for each group of rows. So a batch may be cut over ranks anywhere, and no
rank needs the rows of another to sort its own.

The algorithm is that of MegaBlocks (Gale et al., 2022), and of `torch.nn.functional.grouped_mm`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .rows_by_expert import all_by_expert, own_rows, rows_back

_LIBRARY = torch.library.Library("cg", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "grouped_mm(Tensor left, Tensor right, Tensor ends) -> Tensor"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "grouped_mm.out(Tensor left, Tensor right, Tensor ends, *, Tensor(a!) out) -> Tensor(a!)"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "expert_linear(Tensor input, Tensor weight, Tensor ids, bool partial=False) -> Tensor"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "expert_outer(Tensor left, Tensor right, Tensor ids, SymInt experts, bool partial=False)"
    " -> Tensor"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "expert_order(Tensor ids, SymInt experts, bool partial=False) -> (Tensor, Tensor, Tensor)"
)

_ALIGNMENT = 16
"""Bytes; torch's kernels take rows that begin at multiples of it."""
_ON_HOST = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""The types of which torch's kernel on a host takes matrices; it makes the same products there."""


def expert_linear(input: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Multiply each token by the matrices of the experts that are chosen for it.

    `result[t, k]` is `weight[ids[t, k]] @ input[t]`, or `@ input[t, k]`. All shapes are static, so
    a method that routes tokens by `topk` can be traced, and its batch, its experts and the widths
    may be cut over ranks. On a GPU, bfloat16 with widths that are multiples of 8 is computed by one
    kernel. Other types wait for the device, so they are in no CUDA graph.

    ```python
    shares, ids = self.router(x).softmax(-1).topk(2)
    h = functional.silu(cg.expert_linear(x, self.up, ids))
    return (cg.expert_linear(h, self.down, ids) * shares.unsqueeze(-1)).sum(1)
    ```

    Args:
        input: `[tokens, in]`, the same for each choice, or `[tokens, choices, in]`.
        weight: `[experts, out, in]`, of the input's dtype.
        ids: integers `[tokens, choices]`, from 0 to `experts - 1`.

    Returns:
        `[tokens, choices, out]`, of the input's dtype, on its device.

    Raises:
        ValueError: shapes or dtypes do not fit.
        IndexError: in an execution, an id is no index of an expert. A device stops with an
            assertion.
    """
    fits = (
        (weight.dim(), ids.dim()) == (3, 2)
        and input.shape in ((ids.shape[0], weight.shape[2]), (*ids.shape, weight.shape[2]))
        and input.dtype == weight.dtype
        and not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    )
    if not fits:
        shapes = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (input, weight, ids))
        raise ValueError(
            "cg.expert_linear takes tokens [tokens, in] or [tokens, choices, in], weights "
            f"[experts, out, in] of the same dtype, and integers [tokens, choices], not {shapes}"
        )
    result: Tensor = torch.ops.cg.expert_linear(input, weight, ids)
    return result


def _expert_linear(input: Tensor, weight: Tensor, ids: Tensor, partial: bool = False) -> Tensor:
    """`partial`: ids may be of experts elsewhere, whose products are zeros here."""
    order, ends = by_expert(ids, weight.shape[0], partial)
    rows = rows_by_group(sorted_rows(input, ids, order), weight.transpose(1, 2), ends)
    return in_order_of_ids(rows, ids, order, ends, partial)


def in_order_of_ids(
    rows: Tensor, ids: Tensor, order: Tensor, ends: Tensor, partial: bool
) -> Tensor:
    """Rows in the order of their experts, brought back to that of ids: `[tokens, choices, out]`.

    Args:
        rows: `[rows, out]`, of which those behind the last of `ends` are not defined.
        ids: `[tokens, choices]`.
        order, ends: as `by_expert` gives them.
        partial: whether rows of experts elsewhere are zeros.
    """
    if partial:
        result = rows_back(rows, order, ends, ids.numel())
    else:
        result = rows.new_empty(rows.shape).index_copy_(0, order, rows)
    return result.view(*ids.shape, rows.shape[1])


def _expert_outer(
    left: Tensor, right: Tensor, ids: Tensor, experts: int, partial: bool = False
) -> Tensor:
    """For each expert the sum of `left[t, k] ⊗ right[t, k]` over its rows: `[experts, out, in]`."""
    order, ends = by_expert(ids, experts, partial)
    return _sums_by_group(sorted_rows(left, ids, order), sorted_rows(right, ids, order), ends)


def by_expert(ids: Tensor, experts: int, partial: bool) -> tuple[Tensor, Tensor]:
    """The order that sorts rows by expert, and where each expert's rows end in it, as int32.

    Rows of experts that are elsewhere come last. On a host they are left out: a device would have
    to tell the host how many they are.
    """
    if partial:
        return own_rows(ids, 0, experts)
    return all_by_expert(ids, experts, partial)


def _expert_order(
    ids: Tensor, experts: int, partial: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The order that sorts rows by expert, the place of each row in it, and where groups end."""
    order, ends = all_by_expert(ids, experts, partial)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return order, place, ends


def sorted_rows(rows: Tensor, ids: Tensor, order: Tensor) -> Tensor:
    """Rows of tokens, or of tokens and choices, in the order of their experts."""
    if rows.dim() == 2:
        return rows.index_select(0, order // ids.shape[1])
    return rows.reshape(-1, rows.shape[-1]).index_select(0, order)


def grouped_mm(left: Tensor, right: Tensor, ends: Tensor, out: Tensor | None = None) -> Tensor:
    """Products in groups with offsets, as torch.nn.functional.grouped_mm, for all types, strides.

    Where both are matrices, groups are of the dimension that is contracted. Else they are of the
    rows of the left matrix, or of the columns of the right one.
    """
    if left.dim() == 2 and right.dim() == 3:
        return rows_by_group(left, right, ends, out)
    if left.dim() == 3:
        result = rows_by_group(right.t(), left.transpose(1, 2), ends).t()
    else:
        result = _sums_by_group(left.t(), right, ends)
    return result if out is None else out.copy_(result)


def rows_by_group(
    rows: Tensor, matrices: Tensor, ends: Tensor, out: Tensor | None = None
) -> Tensor:
    """The product of each group of rows with its matrix; what is behind the last is not defined."""
    if (out is None or out.is_cuda) and _has_kernel(rows, matrices):
        result = torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
        return result if out is None else out.copy_(result)
    return group_by_group(rows, matrices.unbind().__getitem__, matrices.shape[2], ends, out)


def group_by_group(
    rows: Tensor,
    matrix: Callable[[int], Tensor],
    width: int,
    ends: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """The product of each group of rows with its matrix, one after the other.

    Args:
        rows: `[rows, in]`.
        matrix: gives that of a group, `[in, width]`; it is asked for groups that have rows.
        width: of the result.
        ends: of groups, int32.
        out: memory for the result, or None.
    """
    products = rows.new_empty(len(rows), width) if out is None else out
    sizes = _sizes(ends, len(rows))
    *parts, _ = rows.split_with_sizes(sizes)
    *places, rest = products.split_with_sizes(sizes)
    for group, (part, place) in enumerate(zip(parts, places, strict=True)):
        if sizes[group]:
            torch.mm(part, matrix(group), out=place)
    if sizes[-1]:
        rest.zero_()
    return products


def _sizes(ends: Tensor, count: int) -> list[int]:
    """How many rows each group has; and, at the end, how many of `count` rows are of none."""
    stops = [*ends.tolist(), count]
    return [stop - start for start, stop in zip([0, *stops], stops, strict=False)]


def _sums_by_group(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """For each group of rows, the product of the left rows, transposed, with the right ones."""
    if _has_kernel(left, right):
        return torch.nn.functional.grouped_mm(left.t(), right, offs=ends)
    sums = left.new_empty(len(ends), left.shape[1], right.shape[1])
    sizes = _sizes(ends, len(left))
    columns = left.t().split_with_sizes(sizes, 1)
    rows = right.split_with_sizes(sizes)
    for total, *factors in zip(sums.unbind(), columns, rows, strict=False):
        torch.mm(*factors, out=total)  # a product over no rows is zeros
    return sums


def _has_kernel(left: Tensor, right: Tensor) -> bool:
    """True if torch's kernel takes them.

    That of CUDA does not wait for the device, so graphs may have it. That of a host makes the
    products of a loop in one call; rows of other widths would have gaps behind them.
    """
    if left.is_cuda:
        fits = left.dtype == right.dtype == torch.bfloat16
    else:
        fits = left.device.type == "cpu" and left.dtype == right.dtype in _ON_HOST
        fits = fits and right.shape[-1] * right.element_size() % _ALIGNMENT == 0
    return fits and _is_aligned(left) and _is_aligned(right)


def _is_aligned(tensor: Tensor) -> bool:
    """True if the matrices of a tensor lie as torch's kernels take them."""
    size, (*outer, row, column) = tensor.element_size(), tensor.stride()
    rows, columns = tensor.shape[-2:]
    is_dense = (column == 1 and row >= columns) or (row == 1 and column >= rows)
    return (
        is_dense
        and tensor.numel() > 0
        and tensor.data_ptr() % _ALIGNMENT == 0
        and max(row, column) * size % _ALIGNMENT == 0
        and all(step * size % _ALIGNMENT == 0 for step in outer)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.partial = inputs[-1]


def _linear_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    input, weight, ids = ctx.saved_tensors
    to_input, to_weight = ctx.needs_input_grad[:2]
    outer = torch.ops.cg.expert_outer
    return (
        _to_rows(input, gradient, weight.transpose(1, 2), ids, ctx.partial) if to_input else None,
        outer(gradient, input, ids, weight.shape[0], ctx.partial) if to_weight else None,
        None,
        None,
    )


def _outer_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    left, right, ids = ctx.saved_tensors
    to_left, to_right = ctx.needs_input_grad[:2]
    return (
        _to_rows(left, right, gradient, ids, ctx.partial) if to_left else None,
        _to_rows(right, left, gradient.transpose(1, 2), ids, ctx.partial) if to_right else None,
        None,
        None,
        None,
    )


def _to_rows(like: Tensor, rows: Tensor, weight: Tensor, ids: Tensor, partial: bool) -> Tensor:
    """The gradient of rows, summed over choices where these are the same rows."""
    gradient: Tensor = torch.ops.cg.expert_linear(rows, weight, ids, partial)
    return gradient.sum(1) if like.dim() == 2 else gradient


def _fake_grouped(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    if left.dim() == 3:
        return left.new_empty(right.shape[1], left.shape[1]).t()
    if right.dim() == 3:
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(ends.shape[0], left.shape[0], right.shape[1])


for _name, _kernel in {
    "grouped_mm": grouped_mm,
    "grouped_mm.out": grouped_mm,
    "expert_linear": _expert_linear,
    "expert_outer": _expert_outer,
    "expert_order": _expert_order,
}.items():
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("cg::grouped_mm", _fake_grouped, lib=_LIBRARY)
torch.library.register_fake(
    "cg::expert_linear",
    lambda input, weight, ids, partial=False: input.new_empty(*ids.shape, weight.shape[1]),
    lib=_LIBRARY,
)
torch.library.register_fake(
    "cg::expert_outer",
    lambda left, right, ids, experts, partial=False: left.new_empty(
        experts, left.shape[-1], right.shape[-1]
    ),
    lib=_LIBRARY,
)
torch.library.register_fake(
    "cg::expert_order",
    lambda ids, experts, partial=False: (
        ids.new_empty(ids.numel(), dtype=torch.int64),
        ids.new_empty(ids.numel(), dtype=torch.int64),
        ids.new_empty(experts, dtype=torch.int32),
    ),
    lib=_LIBRARY,
)
torch.library.register_autograd(
    "cg::expert_linear", _linear_backward, setup_context=_save, lib=_LIBRARY
)
torch.library.register_autograd(
    "cg::expert_outer", _outer_backward, setup_context=_save, lib=_LIBRARY
)

GROUPED_MM = torch.ops.cg.grouped_mm.default
GROUPED_MM_OUT = torch.ops.cg.grouped_mm.out
EXPERT_LINEAR = torch.ops.cg.expert_linear.default
EXPERT_OUTER = torch.ops.cg.expert_outer.default
EXPERT_ORDER = torch.ops.cg.expert_order.default


@register_flop_formula(torch.ops.cg.grouped_mm)
def _grouped_flops(left: Any, right: Any, ends: Any, out_shape: Any = None, **_: Any) -> int:
    """Two for each multiply-add: each row, or each column, meets the matrix of its group."""
    rows, columns = (left, right[-1]) if len(left) == 2 else (left[1:], right[1])
    return 2 * math.prod(map(int, rows)) * int(columns)


@register_flop_formula(torch.ops.cg.expert_linear)
def _linear_flops(
    input: Any, weight: Any, ids: Any, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    return 2 * math.prod(map(int, (*ids, *weight[1:])))


@register_flop_formula(torch.ops.cg.expert_outer)
def _outer_flops(
    left: Any, right: Any, ids: Any, experts: Any, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    return 2 * math.prod(map(int, (*ids, left[-1], right[-1])))


def static_form(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]:
    """A call of an operator, or of the operator here that computes the same.

    Torch's own grouped product has kernels for some types and alignments only, which differ by
    device, and its fake kernel knows those of CUDA alone.
    """
    if op is not torch.ops.aten._grouped_mm.default:
        return op, args, kwargs
    left, right, ends, bias, dtype = (*args, *(None,) * 5)[:5]
    ends = kwargs.get("offs", ends)
    others = (kwargs.get("bias", bias), kwargs.get("out_dtype", dtype))
    if ends is None or others[0] is not None or others[1] not in (None, left.dtype):
        return op, args, kwargs
    return GROUPED_MM, (left, right, ends), {}
