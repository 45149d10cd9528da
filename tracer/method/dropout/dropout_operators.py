"""The operators of attention with dropout as they stand in graphs: the forward, and its gradient.

They draw nothing: which scores are dropped follows from two random words, an operand that the graph
draws, and from the indices of a score. So the backward computes the mask again, and a rank that has
a part of the batch, the heads, the rows or the keys drops what one process would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable

from ....ir.layout import Intervals
from ...operator_library import attention_backward_flops, attention_flops, defined
from ...values.operators import OperatorFunction
from .random_masks import RandomMask
from .tiled_attention import TiledAttention, in_order_of, is_one_tile

_NUMBERS = (
    "float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float scale=1., "
    "int[] batch=[], int[] heads=[], int[] rows=[], int[] columns=[]"
)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    words: Tensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float,
    indices: Mapping[str, Sequence[int]],
) -> TiledAttention:
    sizes = {"batch": query.shape[0], "heads": query.shape[1]}
    sizes |= {"rows": query.shape[2], "columns": key.shape[2]}
    intervals = {n: _intervals(indices.get(n, ()), size) for n, size in sizes.items()}
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    kept = RandomMask(words, dropout_p, **intervals)
    return TiledAttention(query, key, value, attn_mask, kept, is_causal, scale)


def _intervals(bounds: Sequence[int], size: int) -> Intervals:
    """The indices that an argument names by the bounds of their runs; all of them, if by none."""
    return tuple(zip(bounds[::2], bounds[1::2], strict=True)) or ((0, size),)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    words: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float = 1.0,
    **indices: Sequence[int],
) -> tuple[Tensor, Tensor]:
    return _attention(
        query, key, value, words, dropout_p, is_causal, attn_mask, scale, indices
    ).forward()


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    wide = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty(*query.shape[:3], value.shape[3])
    return in_order_of(query, out), query.new_empty(query.shape[:3], dtype=wide)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    words: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float = 1.0,
    of_mask: bool = False,
    **indices: Sequence[int],
) -> list[Tensor]:
    attention = _attention(
        query, key, value, words, dropout_p, is_causal, attn_mask, scale, indices
    )
    gradients = attention.backward(grad_out, out, logsumexp, of_mask)
    if attn_mask is not None and of_mask:
        gradients[3] = gradients[3].view(attn_mask.shape)
    return gradients


def _backward_fake(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    attn_mask: Tensor | None = None,
    of_mask: bool = False,
    **__: Any,
) -> list[Tensor]:
    gradients = [
        in_order_of(tensor, tensor.new_empty(tensor.shape)) for tensor in (query, key, value)
    ]
    if attn_mask is not None and of_mask:
        gradients.append(attn_mask.new_empty(attn_mask.shape))
    return gradients


DROPOUT_ATTENTION = defined(
    f"dropout_attention(Tensor query, Tensor key, Tensor value, Tensor words, {_NUMBERS}) "
    "-> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    flops=attention_flops,
)
DROPOUT_ATTENTION_BACKWARD = defined(
    "dropout_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    f"Tensor out, Tensor logsumexp, Tensor words, {_NUMBERS}, bool of_mask=False) -> Tensor[]",
    _backward,
    _backward_fake,
    flops=lambda grad_out, *operands, **_: attention_backward_flops(*operands[:3]),
)


class DropoutAttentionFunction(OperatorFunction):
    """Attention with dropout as autograd sees it."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        words: Tensor,
        dropout_p: float,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        ctx.options = (dropout_p, is_causal)
        ctx.scale = scale
        out, logsumexp = DROPOUT_ATTENTION(
            query, key, value, words, *ctx.options, attn_mask=attn_mask, scale=scale
        )
        ctx.save_for_backward(query, key, value, out, logsumexp, words, attn_mask)
        result: Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *operands, attn_mask = ctx.saved_tensors
        of_mask = ctx.needs_input_grad[3]
        gradients = DROPOUT_ATTENTION_BACKWARD(
            *(gradient, *operands, *ctx.options),
            attn_mask=attn_mask,
            scale=ctx.scale,
            of_mask=of_mask,
        )
        of_bias = gradients[3] if of_mask else None
        return (*gradients[:3], of_bias, None, None, None, None)


def fused_dropout(node: fx.Node) -> Callable[..., Any] | None:
    """The function that replaces an operator in a graph that is fused; None if nothing does.

    On devices these are the operators of a tile, if all scores are in one. Else a compiler would
    get them once for each tile, and take minutes, so it calls the operator.
    """
    function = _FUSED.get(node.target)
    if function is None:
        return None
    values = dict(zip(_names(node.target), node.args, strict=False))
    query, key = (values[name].meta["val"] for name in ("query", "key"))  # type: ignore[union-attr]
    return function if query.is_cuda and is_one_tile(query, key) else None


def _names(operator: Any) -> list[str]:
    return [argument.name for argument in operator._schema.arguments]


_FUSED: Mapping[Any, Callable[..., Any]] = {
    DROPOUT_ATTENTION: _forward,
    DROPOUT_ATTENTION_BACKWARD: _backward,
}
