"""Modules for layers of transformers' decoders, with merged products and a paged cache.

A layer keeps its own code. Its norms, its attention and its MLP are replaced by modules that
compute the same with fewer operators: on CPUs, and for few rows on devices, their number bounds
the speed of a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from .attention import Pages, attend

FIXED_TURNS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose angles do not depend on how long the sequence is."""


def merge(layer: nn.Module) -> None:
    """Replace the norms, the attention and the MLP of a decoder layer, weights included."""
    layer.input_layernorm = RmsNorm(layer.input_layernorm)
    layer.post_attention_layernorm = RmsNorm(layer.post_attention_layernorm)
    layer.self_attn = Attention(layer.self_attn)
    layer.mlp = Mlp(layer.mlp)


class RmsNorm(nn.Module):
    """The norm of transformers by the root of the mean of squares, with one reduction."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.weight = old.weight
        self.epsilon = old.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:  # one kernel
            return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return _norm(x, self.weight, self.epsilon)


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    length = torch.linalg.vector_norm(x, 2, -1, keepdim=True, dtype=torch.float32)
    least = torch.full((1,), epsilon, dtype=torch.float32, device=x.device)
    shrink = torch.addcmul(least, length, length, value=1 / x.shape[-1]).rsqrt()
    return weight * (x * shrink).to(x.dtype)


class Attention(nn.Module):
    """Attention over a paged cache, with one product for queries, keys and values.

    The product's rows are those of one KV head after the other: the queries that share it, its
    key, its value. So a part of the KV heads is a part of the rows.
    """

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.layer = old.layer_idx
        self.scale = old.scaling
        self.width = old.head_dim
        self.shared = old.num_key_value_groups
        self.turns = bool(getattr(old, "use_rope", True))  # SmolLM3 has layers without positions
        sizes = [self.shared * self.width, self.width, self.width]
        self.qkv = _merged((old.q_proj, old.k_proj, old.v_proj), sizes)
        self.o_proj = old.o_proj
        self.epsilon: float | None = None
        if hasattr(old, "q_norm"):  # Qwen3
            norms = [*[old.q_norm.weight] * self.shared, old.k_norm.weight]
            self.norms = nn.Parameter(torch.stack(norms), requires_grad=False)
            self.epsilon = old.q_norm.variance_epsilon

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        pages: Pages,
        **_: Any,
    ) -> tuple[Tensor, None]:
        rows, tokens, _width = hidden_states.shape
        heads = self.qkv(hidden_states).view(rows, tokens, -1, self.shared + 2, self.width)
        query_key, value = heads.split((self.shared + 1, 1), -2)
        if self.epsilon is not None:
            query_key = _norm(query_key, self.norms, self.epsilon)
        if self.turns:
            query_key = turned(query_key, *position_embeddings)
        query, key = query_key.split((self.shared, 1), -2)
        mixed = attend(query, torch.cat([key, value], -2), pages, self.layer, self.scale)
        return self.o_proj(mixed), None


class Mlp(nn.Module):
    """A gated MLP, with one product for the gate and the values that it gates."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.gate_up = _merged((old.gate_proj, old.up_proj), [old.gate_proj.out_features] * 2)
        self.down_proj = old.down_proj
        self.act = old.act_fn

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down_proj(self.act(gate) * up)


def _merged(parts: Sequence[nn.Linear], sizes: Sequence[int]) -> nn.Linear:
    """Merge linear layers of one input, with `sizes` rows of each layer in turn."""

    def merged(tensors: Sequence[Tensor]) -> nn.Parameter:
        blocks = [t.unflatten(0, (-1, size)) for t, size in zip(tensors, sizes, strict=True)]
        return nn.Parameter(torch.cat(blocks, 1).flatten(0, 1), requires_grad=False)

    has_bias = parts[0].bias is not None
    weight = merged([part.weight for part in parts])
    new = nn.Linear(weight.shape[1], weight.shape[0], has_bias, device="meta")
    new.weight = weight
    if has_bias:
        new.bias = merged([part.bias for part in parts])
    return new


def turns(rotary: nn.Module, context: int, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of all positions, [context, 2, width], by transformers' own module.

    The first half of the sines has the other sign, so that `turned` needs no negation.
    """
    cosines, sines = rotary(torch.zeros(1, dtype=dtype), torch.arange(context)[None])
    half = sines.shape[-1] // 2
    signed = torch.cat([-sines[..., :half], sines[..., half:]], -1)
    return torch.stack([cosines[0], signed[0]], 1)


def turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn heads by their positions.

    Args:
        x: [rows, tokens, groups, heads, width].
        cosines, sines: [rows, tokens, 1, 1, width], as `turns` gives them.
    """
    return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, -1), sines)
