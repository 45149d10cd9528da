"""Let traced methods call `torch.nn.attention.varlen.varlen_attn` on hosts.

Torch has a kernel for GPUs alone, which stays there. On hosts it is attention with a mask of
documents: a token sees those of its own document. Documents may be empty. So a tensor of as many
borders as there can be, and bounds for `max_q` and `max_k`, make shapes that do not depend on data.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...error_translation import refusal_here
from ..purity.function_log import Unlike
from .flex_calls import FLEX_MODULE, attend, flex_attention_traced
from .flex_operators import ONE_BLOCK

_STATIC = (
    "give a Python number that no document exceeds, such as the number of tokens; and to cu_seq_q "
    "and cu_seq_k as many borders as there can be: further ones repeat the last"
)

_VARLEN_MODULE = "torch.nn.attention.varlen"


@contextmanager
def attention_traced(shown: str) -> Iterator[None]:
    """Let `flex_attention` and `varlen_attn` be traced inside the `with` block.

    Args:
        shown: the traced call in words.
    """
    with flex_attention_traced(shown), _varlen_attention_traced(shown):
        yield


@contextmanager
def attention_compared(shown: str) -> Iterator[None]:
    """Do as `attention_traced` for a call that is compared with a trace of an earlier start.

    A module that is not loaded has functions that nobody can call, so it is not loaded for that.

    Raises:
        Unlike: the call has loaded one.
    """
    absent = [name for name in _TRACED if name not in sys.modules]
    with ExitStack() as stack:
        for name, traced in _TRACED.items():
            if name not in absent:
                stack.enter_context(traced(shown))
        yield
    if any(name in sys.modules for name in absent):
        raise Unlike


@contextmanager
def _varlen_attention_traced(shown: str) -> Iterator[None]:
    # Imported here, since TorchDynamo comes with it, and sympy.
    names: dict[str, Any] = vars(importlib.import_module(_VARLEN_MODULE))
    kernels = torch.ops.torch_attn

    def attention(query: Tensor, *others: Any) -> Any:
        if query.device.type == "cpu":
            return _traced(shown, query, *others)
        return kernels._varlen_attn(query, *others)

    own = SimpleNamespace(
        _varlen_attn=attention,
        _varlen_attn_backward=kernels._varlen_attn_backward,
        _varlen_attn_out=kernels._varlen_attn_out if "varlen_attn_out" in names else None,
    )
    with_kernel = ModuleType("torch")  # as the module finds it
    vars(with_kernel).update(vars(torch))
    vars(with_kernel)["ops"] = SimpleNamespace(aten=torch.ops.aten, torch_attn=own)
    before = names["torch"]
    names["torch"] = with_kernel
    try:
        yield
    finally:
        names["torch"] = before


_TRACED = {FLEX_MODULE: flex_attention_traced, _VARLEN_MODULE: _varlen_attention_traced}


def _traced(
    shown: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: Any,
    max_k: Any,
    is_causal: bool,
    scale: float | None,
    window: Sequence[int],
    enable_gqa: bool = False,
    *paged: Any,
) -> tuple[Tensor, Tensor, None]:
    for name, longest in (("max_q", max_q), ("max_k", max_k)):
        if not isinstance(longest, int):
            raise refusal_here(shown, f"{name} of varlen_attn is a tensor", _STATIC)
    if cu_seq_k is None or any(argument is not None for argument in paged):
        raise refusal_here(
            shown,
            "varlen_attn on hosts has no seqused_k, block_table or num_splits",
            "leave them out, and give cu_seq_k",
        )
    own, others = cu_seq_q.diff(), cu_seq_k.diff()
    count, lengths = own.shape[0], (query.shape[0], key.shape[0])
    of_query, of_key = (
        torch.bucketize(torch.arange(length), borders[1:], right=True)
        for length, borders in zip(lengths, (cu_seq_q, cu_seq_k), strict=True)
    )
    # The last rows of a document see its last keys, if there are fewer of one than of the other.
    starts = (cu_seq_q[:-1] - (others - own), cu_seq_k[:-1])
    place, place_of_key = (
        torch.arange(length) - start[documents.clamp(max=count - 1)]
        for length, start, documents in zip(lengths, starts, (of_query, of_key), strict=True)
    )
    left, right = window

    def within(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        sees = (of_query[i] == of_key[j]) & (of_query[i] < count)
        distance = place[i] - place_of_key[j]
        if left >= 0:
            sees = sees & (distance <= left)
        return sees & (distance >= -right) if right >= 0 else sees

    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    mask = (1, 1, *[None] * 8, *ONE_BLOCK, within)
    out, logsumexp, _ = attend(shown, q, k, v, _same, mask, factor, {})
    return out.squeeze(0).transpose(0, 1), logsumexp.squeeze(0) * math.log(2), None


def _same(score: Tensor, *indices: Tensor) -> Tensor:
    return score
