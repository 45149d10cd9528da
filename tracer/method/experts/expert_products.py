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

_LIBRARY = torch.library.Library("cg", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "grouped_mm(Tensor left, Tensor right, Tensor ends) -> Tensor"
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
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "own_rows(Tensor ids, SymInt first, SymInt experts, bool all_rows=False) -> (Tensor, Tensor)"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "first_rows(Tensor(a) rows, Tensor order) -> Tensor(a)"
)
_LIBRARY.define("with_room(Tensor rows, SymInt count) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "rows_back(Tensor rows, Tensor order, Tensor ends, SymInt count) -> Tensor"
)

_ALIGNMENT = 16
"""Bytes; the kernel of CUDA takes rows that begin at multiples of it."""


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
        result = _rows_back(rows, order, ends, ids.numel())
    else:
        result = rows.new_empty(rows.shape).index_copy_(0, order, rows)
    return result.view(*ids.shape, rows.shape[1])


def _rows_back(rows: Tensor, order: Tensor, ends: Tensor, count: int) -> Tensor:
    """Rows that are sorted by expert, at their places among `count`; all others are zeros."""
    if rows.device.type == "cpu":
        last = int(ends[-1]) if len(ends) else 0
        rows, order = rows[:last], order[:last]
    else:
        is_here = torch.arange(len(rows), device=rows.device) < ends[-1]
        rows = torch.where(is_here.view(-1, *(1,) * (rows.dim() - 1)), rows, 0)
    make = rows.new_empty if len(rows) == count else rows.new_zeros
    return make(count, *rows.shape[1:]).index_copy_(0, order, rows)


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
        return _own_rows(ids, 0, experts)
    return _all_by_expert(ids, experts, partial)


def _own_rows(
    ids: Tensor, first: int, experts: int, all_rows: bool = False
) -> tuple[Tensor, Tensor]:
    """The order and the ends of `by_expert` for a rank that has some of the experts.

    Args:
        ids: integers `[tokens, choices]`.
        first, experts: the rank's first expert, and how many it has.
        all_rows: whether rows of experts elsewhere come last, also on a host.
    """
    if ids.device.type != "cpu":
        return _all_by_expert(ids - first, experts, partial=True)
    ranked, order = ids.reshape(-1).to(torch.int64).sort(stable=True)
    numbers = torch.arange(first - 1, first + experts)
    bounds = torch.searchsorted(ranked, numbers, right=True, out_int32=True)
    start, end = int(bounds[0]), int(bounds[-1])
    own = order[start:end]
    if all_rows:
        own = torch.cat([own, order[:start], order[end:]])
    return own, bounds[1:] - bounds[0]


def _first_rows(rows: Tensor, order: Tensor) -> Tensor:
    """The rows that an order has, of those that are sorted by it."""
    return rows[: len(order)]


def _with_room(rows: Tensor, count: int) -> Tensor:
    """A copy of rows that are sorted by expert, as `count` rows; the others are not defined."""
    result = rows.new_empty(count, *rows.shape[1:])
    result[: len(rows)] = rows
    return result


def _expert_order(
    ids: Tensor, experts: int, partial: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The order that sorts rows by expert, the place of each row in it, and where groups end."""
    order, ends = _all_by_expert(ids, experts, partial)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return order, place, ends


def _all_by_expert(ids: Tensor, experts: int, partial: bool) -> tuple[Tensor, Tensor]:
    flat = ids.reshape(-1)
    is_here = (flat >= 0) & (flat < experts)
    if partial:
        flat = torch.where(is_here, flat, experts)
    elif flat.device.type != "cpu":
        torch._assert_async(is_here.all())  # the host does not wait for the device
    elif not is_here.all():
        raise IndexError(
            f"expert_linear: {int(flat[~is_here][0])} is the index of no expert: there are "
            f"{experts}, 0 to {experts - 1}; correct the ids"
        )
    ranked, order = flat.to(torch.int32).sort(stable=True)
    numbers = torch.arange(experts, device=ids.device, dtype=torch.int32)
    return order, torch.searchsorted(ranked, numbers, right=True, out_int32=True)


def sorted_rows(rows: Tensor, ids: Tensor, order: Tensor) -> Tensor:
    """Rows of tokens, or of tokens and choices, in the order of their experts."""
    if rows.dim() == 2:
        return rows.index_select(0, order // ids.shape[1])
    return rows.reshape(-1, rows.shape[-1]).index_select(0, order)


def _grouped_mm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Products in groups with offsets, as torch.nn.functional.grouped_mm, for all types, strides.

    Where both are matrices, groups are of the dimension that is contracted. Else they are of the
    rows of the left matrix, or of the columns of the right one.
    """
    if left.dim() == 3:
        return rows_by_group(right.t(), left.transpose(1, 2), ends).t()
    if right.dim() == 3:
        return rows_by_group(left, right, ends)
    return _sums_by_group(left.t(), right, ends)


def rows_by_group(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """The product of each group of rows with its matrix; what is behind the last is not defined."""
    if _has_kernel(rows, matrices):
        return torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
    return group_by_group(rows, lambda group: matrices[group], matrices.shape[2], ends)


def group_by_group(
    rows: Tensor, matrix: Callable[[int], Tensor], width: int, ends: Tensor
) -> Tensor:
    """The product of each group of rows with its matrix, one after the other.

    Args:
        rows: `[rows, in]`.
        matrix: gives that of a group, `[in, width]`; it is asked for groups that have rows.
        width: of the result.
        ends: of groups, int32.
    """
    products = rows.new_empty(len(rows), width)
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(rows[start:end], matrix(group), out=products[start:end])
        start = end
    products[start:].zero_()
    return products


def _sums_by_group(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """For each group of rows, the product of the left rows, transposed, with the right ones."""
    if _has_kernel(left, right):
        return torch.nn.functional.grouped_mm(left.t(), right, offs=ends)
    sums = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    start = 0
    for total, end in zip(sums, ends.tolist(), strict=True):
        if end > start:
            torch.mm(left[start:end].t(), right[start:end], out=total)
        start = end
    return sums


def _has_kernel(*tensors: Tensor) -> bool:
    """True if CUDA's kernel takes them; it does not wait for the device, so graphs may have it."""
    return all(
        tensor.is_cuda
        and tensor.dtype == torch.bfloat16
        and tensor.numel() > 0
        and tensor.data_ptr() % _ALIGNMENT == 0
        and sorted(tensor.stride())[0] == 1
        and all(
            step * tensor.element_size() % _ALIGNMENT == 0 for step in sorted(tensor.stride())[1:]
        )
        for tensor in tensors
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
    "grouped_mm": _grouped_mm,
    "expert_linear": _expert_linear,
    "expert_outer": _expert_outer,
    "expert_order": _expert_order,
    "own_rows": _own_rows,
    "first_rows": _first_rows,
    "with_room": _with_room,
    "rows_back": _rows_back,
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
torch.library.register_fake(
    "cg::own_rows",
    lambda ids, first, experts, all_rows=False: (
        ids.new_empty(ids.numel(), dtype=torch.int64),
        ids.new_empty(experts, dtype=torch.int32),
    ),
    lib=_LIBRARY,
)
torch.library.register_fake("cg::first_rows", _first_rows, lib=_LIBRARY)
torch.library.register_fake(
    "cg::with_room", lambda rows, count: rows.new_empty(count, *rows.shape[1:]), lib=_LIBRARY
)
torch.library.register_fake(
    "cg::rows_back",
    lambda rows, order, ends, count: rows.new_empty(count, *rows.shape[1:]),
    lib=_LIBRARY,
)
torch.library.register_autograd(
    "cg::expert_linear", _linear_backward, setup_context=_save, lib=_LIBRARY
)
torch.library.register_autograd(
    "cg::expert_outer", _outer_backward, setup_context=_save, lib=_LIBRARY
)

GROUPED_MM = torch.ops.cg.grouped_mm.default
EXPERT_LINEAR = torch.ops.cg.expert_linear.default
EXPERT_OUTER = torch.ops.cg.expert_outer.default
EXPERT_ORDER = torch.ops.cg.expert_order.default
OWN_ROWS = torch.ops.cg.own_rows.default
FIRST_ROWS = torch.ops.cg.first_rows.default
WITH_ROOM = torch.ops.cg.with_room.default
ROWS_BACK = torch.ops.cg.rows_back.default


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
