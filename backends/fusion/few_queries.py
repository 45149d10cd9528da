"""Attention of few queries on the host, in operators that TorchInductor makes loops of.

TorchInductor calls torch's kernel for attention on CPUs, which starts a product of matrices for
each head, and takes keys and values side by side. For few queries, to start the products takes
longer than the products do, and keys of a paged cache are copied for the kernel alone. Loops read
them in place.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

FEW = 4
"""The most queries of a head for loops: they take 0.6 to 0.9 of the kernel's time; with 8, more."""


def loop_over_few(graph: fx.Graph) -> None:
    """Let attention on the host take loops where it has few queries and no backward."""
    for node in graph.nodes:
        if node.target is KERNEL and all(map(_takes_result, node.users)):
            node.target = attend


def _takes_result(user: fx.Node) -> bool:
    """True if a user takes the result, and not the logarithms of sums, which a backward takes."""
    return user.target is operator.getitem and user.args[1:] == (0,)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Attention as the kernel computes it, by loops if there are few queries.

    Args:
        query: [rows, heads, queries, width].
        key, value: [rows, heads, entries, width].
        dropout_p, is_causal, attn_mask, scale: as `scaled_dot_product_attention` takes them.
    """
    is_plain = not (dropout_p or is_causal) and key.shape[1] == query.shape[1]
    if query.shape[2] > FEW or not is_plain:
        outputs: tuple[Tensor, ...] = KERNEL(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )
        return outputs
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    dtype = torch.promote_types(query.dtype, torch.float32)  # that the kernel sums in
    queries, keys, values = (x.to(dtype) for x in (query, key, value))
    scores = (_in_memory(queries * factor)[:, :, :, None] * keys[:, :, None]).sum(-1)
    if attn_mask is not None:
        scores = scores + attn_mask
    most = scores.amax(-1, keepdim=True)
    shares = (scores - most.masked_fill(most == -torch.inf, 0)).exp()
    # A sum is at least 1, its largest share; or 0 where nothing is seen, which gives zeros.
    sums = shares.sum(-1, keepdim=True).clamp(min=1)
    mixed = (shares[..., None] * values[:, :, None]).sum(-2) / sums
    return (torch.empty_like(query).copy_(mixed),)  # strides are the query's, too


def _in_memory(x: Tensor) -> Tensor:
    """The same values in memory: a fused kernel computes them once, and not for each reader."""
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())
