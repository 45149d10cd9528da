"""Qwen2.5-0.5B's shapes with random weights: transformers' model and a static cache, an actor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM, StaticCache

import cg


@dataclass(frozen=True)
class Sizes:
    """What is decoded.

    Attributes:
        layers, hidden, mlp, heads, groups, vocabulary: of the model.
        context: tokens that a cache holds.
        filled: tokens that it holds when a measurement begins.
        batches: sequences that are decoded at a time.
        inner: steps of a measurement.
    """

    layers: int = 24
    hidden: int = 896
    mlp: int = 4864
    heads: int = 14
    groups: int = 2
    vocabulary: int = 151_936
    context: int = 1024
    filled: int = 960
    batches: tuple[int, ...] = (1, 8, 32)
    inner: int = 40

    def config(self, context: int | None = None) -> Qwen2Config:
        """As transformers has it, for sequences of `context` tokens, or those of a cache."""
        return Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.groups,
            max_position_embeddings=context or self.context,
            tie_word_embeddings=True,
            eos_token_id=None,
            bos_token_id=None,
        )


REAL = Sizes()
SMALL = Sizes(2, 64, 96, 4, 2, 512, context=64, filled=32, batches=(1, 2), inner=4)


@cg.actor
class Decoder(nn.Module):
    """A model and its cache, both on `device`.

    Args:
        sizes: of the model and of its cache.
        batch: sequences that are decoded at a time.
    """

    def __init__(self, sizes: Sizes, batch: int, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.filled = sizes.filled
        config = sizes.config()
        with torch.device(device):
            model = Qwen2ForCausalLM(config).to(dtype)
        self.model = model.eval().requires_grad_(False)
        self.cache = StaticCache(config=config, max_cache_len=sizes.context)
        width = sizes.hidden // sizes.heads
        self.cache.early_initialization(batch, sizes.groups, width, dtype, torch.device(device))
        for layer in self.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.rewind()

    def step(self, ids: Tensor) -> Tensor:
        """The likeliest next tokens, int64 [batch, 1], of the tokens that came last."""
        logits = self.model(ids, past_key_values=self.cache, use_cache=True).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def rewind(self) -> None:
        """As before the first step, with the same memory."""
        torch._foreach_copy_(
            [layer.cumulative_length for layer in self.cache.layers],
            [torch.tensor(self.filled)] * len(self.cache.layers),
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads; the tied head is read once."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(
            each.numel() * each.element_size()
            for layer in self.cache.layers
            for each in (layer.keys, layer.values)
        )
