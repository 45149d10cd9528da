"""The operators of `flex_attention` as they stand in graphs: the forward, and its gradient.

They compute torch's eager formula, which has all scores in memory. Where a graph for GPUs
is fused, they become torch's higher-order operators again, of which TorchInductor makes its kernel.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._higher_order_ops.flex_attention import (
    _permute_strides,
    flex_attention,
    flex_attention_backward,
)
from torch.autograd.function import once_differentiable

from ...operator_library import attention_backward_flops, attention_flops, defined
from ...values.operators import OperatorFunction
from .dense_attention import DenseAttention
from .modifications import WHOLE_RUNS, RankRuns, modification, reads_index

_INDICES = "int[] batch, int[] heads, int[] rows, int[] columns"
_CAPTURED = "Tensor[] captured, Tensor[] mask_captured, Tensor?[] blocks"

ONE_BLOCK = (1 << 30, 1 << 30)
"""The rows and columns of a block that all scores are in, as torch has it."""

_HIGHER_ORDER: Any = flex_attention
_HIGHER_ORDER_BACKWARD: Any = flex_attention_backward

Aligned: TypeAlias = tuple[tuple[int | None, ...], ...]


@dataclass(frozen=True)
class FlexForm:
    """The computation of attention: functions of scores, their derivative, and numbers.

    Attributes:
        score: the text of `score_mod`.
        joint: the text of its derivative; "" if there is no backward.
        mask: the text of `mask_mod`.
        scale: the factor of products.
        options: the kernel's options as JSON.
        lengths: the lengths of queries and keys that the blocks of the mask are of.
        block: the rows and columns of a block.
        unset: how many things torch's operators take behind the tensors of blocks, which are None.
        aligned, mask_aligned: for each captured tensor of `score_mod` and of `mask_mod`, and each
            of its dimensions, the number of the index that alone indexes it.
    """

    score: str
    joint: str
    mask: str
    scale: float
    options: str
    lengths: tuple[int, ...]
    block: tuple[int, ...]
    unset: int
    aligned: Aligned
    mask_aligned: Aligned

    @property
    def text(self) -> str:
        """It as an argument of an operator."""
        return json.dumps(astuple(self))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def read(text: str) -> FlexForm:
        """The form of a text."""
        score, joint, mask, scale, options, lengths, block, unset, *dims = json.loads(text)
        aligned, masked = (tuple(map(tuple, tensors)) for tensors in dims)
        sizes = (tuple(lengths), tuple(block), unset)
        return FlexForm(score, joint, mask, scale, options, *sizes, aligned, masked)

    @property
    def masks_nothing(self) -> bool:
        """True if the function of the mask does not look at its indices, as torch's default."""
        return not any(reads_index(self.mask, index) for index in range(4))

    def block_mask(self, blocks: Sequence[Any], mask: Any) -> tuple[Any, ...]:
        """The mask as torch's operators take it: lengths, tensors of blocks, sizes, a function."""
        return (*self.lengths, *blocks, *[None] * self.unset, *self.block, mask)

    def functions(
        self, captured: Sequence[Tensor], masked: Sequence[Tensor], indices: Sequence[Any]
    ) -> tuple[fx.GraphModule, fx.GraphModule | None, fx.GraphModule]:
        """The functions of scores and of the mask for a rank, with the derivative between them.

        Args:
            captured, masked: the rank's pieces of the tensors that they capture.
            indices: the arguments of an operator that say which indices the rank has.
        """
        runs = tuple(map(tuple, indices))
        of_score = RankRuns(runs, tuple(tuple(x.shape) for x in captured), self.aligned)
        of_mask = RankRuns(runs, tuple(tuple(x.shape) for x in masked), self.mask_aligned)
        return (
            modification(self.score, True, of_score),
            modification(self.joint, True, of_score) if self.joint else None,
            modification(self.mask, False, of_mask),
        )


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: Sequence[Tensor],
    mask_captured: Sequence[Tensor],
    blocks: Sequence[Tensor | None],
    form: str,
    *indices: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    own = FlexForm.read(form)
    score, _, mask = own.functions(captured, mask_captured, indices)
    return DenseAttention(query, key, value, own.scale, mask, mask_captured).forward(
        score, captured
    )


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
    out = query.new_empty(*query.shape[:3], value.shape[3])
    wide = torch.promote_types(query.dtype, torch.float32)
    statistics = [query.new_empty(query.shape[:3], dtype=wide) for _ in range(2)]
    return _permute_strides(out, query.stride()), *statistics


def _backward(
    grad_out: Tensor | None,
    grad_logsumexp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    captured: Sequence[Tensor],
    mask_captured: Sequence[Tensor],
    blocks: Sequence[Tensor | None],
    form: str,
    needs: Sequence[bool],
    *indices: Sequence[int],
) -> list[Tensor]:
    own = FlexForm.read(form)
    score, joint, mask = own.functions(captured, mask_captured, indices)
    assert joint is not None
    gradients, of_captured = DenseAttention(
        query, key, value, own.scale, mask, mask_captured
    ).backward(score, joint, captured, (out, logsumexp), (grad_out, grad_logsumexp))
    pairs = zip(captured, of_captured, needs, strict=True)
    return [*gradients, *(g.to(x.dtype) for x, g, needed in pairs if needed and g is not None)]


def _backward_fake(
    grad_out: Tensor | None,
    grad_logsumexp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    captured: Sequence[Tensor],
    mask_captured: Sequence[Tensor],
    blocks: Sequence[Tensor | None],
    form: str,
    needs: Sequence[bool],
    *indices: Sequence[int],
) -> list[Tensor]:
    own = [
        _permute_strides(tensor.new_empty(tensor.shape), tensor.stride())
        for tensor in (query, key, value)
    ]
    pairs = zip(captured, needs, strict=True)
    contiguous = torch.contiguous_format
    return [*own, *(torch.empty_like(t, memory_format=contiguous) for t, needed in pairs if needed)]


FLEX_ATTENTION = defined(
    f"flex_attention(Tensor query, Tensor key, Tensor value, {_CAPTURED}, str form, {_INDICES}) "
    "-> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    flops=attention_flops,
)
FLEX_ATTENTION_BACKWARD = defined(
    "flex_attention_backward(Tensor? grad_out, Tensor? grad_logsumexp, Tensor query, Tensor key, "
    f"Tensor value, Tensor out, Tensor logsumexp, {_CAPTURED}, str form, bool[] needs, {_INDICES})"
    " -> Tensor[]",
    _backward,
    _backward_fake,
    flops=lambda grad_out, grad_logsumexp, *others, **_: attention_backward_flops(*others[:3]),
)


class FlexAttentionFunction(OperatorFunction):
    """Attention as autograd sees it: takes queries, keys, values and all other tensors.

    It takes the form, and how many of the other tensors `score_mod` and `mask_mod` capture; the
    others are those of blocks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        form: str,
        counts: tuple[int, int],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *others: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, logsumexp, largest = FLEX_ATTENTION(
            query, key, value, *_by_role(others, counts), form, *WHOLE_RUNS
        )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(largest)
        ctx.form, ctx.counts = form, counts
        ctx.save_for_backward(query, key, value, out, logsumexp, *others)
        return out, logsumexp, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        operands, others = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        first = 5
        needs = list(ctx.needs_input_grad[first : first + ctx.counts[0]])
        if gradients[0] is None and gradients[1] is None:
            return (None,) * (first + len(others))
        own = FLEX_ATTENTION_BACKWARD(
            *gradients[:2], *operands, *_by_role(others, ctx.counts), ctx.form, needs, *WHOLE_RUNS
        )
        of_captured = iter(own[3:])
        captured = [next(of_captured) if is_needed else None for is_needed in needs]
        return (None, None, *own[:3], *captured, *[None] * (len(others) - len(needs)))


def _by_role(others: Sequence[Any], counts: tuple[int, int]) -> tuple[list[Any], ...]:
    scores, masks = counts[0], sum(counts)
    return list(others[:scores]), list(others[scores:masks]), list(others[masks:])


def _fused_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: Sequence[Tensor],
    mask_captured: Sequence[Tensor],
    blocks: Sequence[Tensor | None],
    form: str,
    *indices: Sequence[int],
) -> Any:
    own = FlexForm.read(form)
    score, _, mask = own.functions(captured, mask_captured, indices)
    block_mask = own.block_mask(blocks or _one_block(query), mask)
    operands = (query, key, value, score, block_mask, own.scale, json.loads(own.options))
    return _HIGHER_ORDER(*operands, tuple(captured), tuple(mask_captured))


def _fused_backward(
    grad_out: Tensor | None,
    grad_logsumexp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    captured: Sequence[Tensor],
    mask_captured: Sequence[Tensor],
    blocks: Sequence[Tensor | None],
    form: str,
    needs: Sequence[bool],
    *indices: Sequence[int],
) -> list[Tensor]:
    own = FlexForm.read(form)
    score, joint, mask = own.functions(captured, mask_captured, indices)
    block_mask = own.block_mask(blocks or _one_block(query), mask)
    operands = (query, key, value, out, logsumexp, grad_out, grad_logsumexp, score, joint)
    options = json.loads(own.options)
    *gradients, of_captured = _HIGHER_ORDER_BACKWARD(
        *operands, block_mask, own.scale, options, tuple(captured), tuple(mask_captured)
    )
    pairs = zip(of_captured, needs, strict=True)
    return [*gradients, *(gradient for gradient, is_needed in pairs if is_needed)]


def _one_block(like: Tensor) -> list[Tensor | None]:
    """The tensors of a mask with one block, in which each score is asked for by the function."""
    count = like.new_ones((1, 1, 1), dtype=torch.int32)
    indices = like.new_zeros((1, 1, 1, 1), dtype=torch.int32)
    return [count, indices, None, None] * 2


_FUSED: Mapping[Any, Callable[..., Any]] = {
    FLEX_ATTENTION: _fused_forward,
    FLEX_ATTENTION_BACKWARD: _fused_backward,
}


def fused_form(node: fx.Node) -> Callable[..., Any] | None:
    """The function that replaces an operator in a graph that is fused; None if nothing does.

    On GPUs it is torch's higher-order operator, whose kernel TorchInductor makes.
    """
    fused = _FUSED.get(node.target)
    operands = (argument for argument in node.args if isinstance(argument, fx.Node))
    return fused if fused is not None and next(operands).meta["val"].is_cuda else None
