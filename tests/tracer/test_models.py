"""Models of the transformers library work inside actors, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from .function_tools import check_equal, trace

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.timeout(300)]

TINY = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
}
TOKENS = torch.randint(31, (2, 7), generator=torch.Generator().manual_seed(0))
PADDING = torch.ones(2, 7, dtype=torch.int64).index_fill(1, torch.tensor([0]), 0)


def causal_lm(family: str, **config: Any) -> nn.Module:
    torch.manual_seed(0)
    if family == "gpt2":
        gpt2 = transformers.GPT2Config(
            vocab_size=31, n_embd=16, n_head=4, n_positions=32, **{"n_layer": 2, **config}
        )
        return transformers.GPT2LMHeadModel(gpt2)
    name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama", "mistral": "Mistral"}[family]
    built = getattr(transformers, f"{name}Config")(**{**TINY, **config})
    return getattr(transformers, f"{name}ForCausalLM")(built)  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """An actor around a whole causal language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def logits(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.model(tokens, attention_mask=mask, use_cache=False).logits

    def loss(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, attention_mask=mask, labels=tokens, use_cache=False).loss

    def autocast(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(tokens, use_cache=False).logits.float()

    def decode(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Prefill, then one token with the cache."""
        first = self.model(tokens, use_cache=True)
        token = first.logits[:, -1:].argmax(-1)
        return token, self.model(token, past_key_values=first.past_key_values).logits


class DecoderLayers(nn.Module):
    """A pipeline stage made of decoder layers, as a user cuts a model."""

    def __init__(self, model: Any, layers: slice) -> None:
        super().__init__()
        self.layers = model.model.layers[layers]
        self.rotary = model.model.rotary_emb

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(h.shape[1], device=h.device)[None]
        rotary = self.rotary(h, positions)
        for layer in self.layers:
            out = layer(h, position_ids=positions, position_embeddings=rotary)
            h = out[0] if isinstance(out, tuple) else out
        return h


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
def test_causal_language_models(family: str) -> None:
    actor = LanguageModel(causal_lm(family)).eval()
    check_equal(actor, "logits", TOKENS)
    check_equal(actor, "loss", TOKENS, PADDING)


def test_grouped_queries() -> None:
    """While it is traced, the library masks explicitly and repeats keys, so sums are reordered."""
    actor = LanguageModel(causal_lm("qwen2", num_key_value_heads=2))
    check_equal(actor, "logits", TOKENS, tolerance=1e-5)


def test_gpt2_with_dropout() -> None:
    check_equal(LanguageModel(causal_lm("gpt2")).train(), "loss", TOKENS, PADDING)


def test_eager_attention_and_autocast() -> None:
    model = causal_lm("qwen2", attn_implementation="eager")
    check_equal(LanguageModel(model), "logits", TOKENS)
    check_equal(LanguageModel(causal_lm("llama")), "autocast", TOKENS)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_stages_of_decoder_layers(family: str) -> None:
    hidden = torch.randn(2, 7, 16, requires_grad=True)
    model = causal_lm(family, num_key_value_heads=2)
    check_equal(DecoderLayers(model, slice(1, 2)), "forward", hidden)


def test_a_cache_inside_a_method() -> None:
    with torch.no_grad():
        actor = LanguageModel(causal_lm("qwen2").requires_grad_(False))
        check_equal(actor, "decode", TOKENS, tolerance=1e-6)


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        text = {k: v for k, v in TINY.items() if k != "num_key_value_heads"}
        vision = {**text, "image_size": 16, "patch_size": 8}
        del vision["vocab_size"], vision["max_position_embeddings"]
        config = transformers.CLIPConfig(
            text_config={**text, "eos_token_id": 30, "bos_token_id": 29, "pad_token_id": 28},
            vision_config=vision,
            projection_dim=8,
        )
        self.model = transformers.CLIPModel(config)

    def towers(self, tokens: torch.Tensor, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.model(input_ids=tokens, pixel_values=pixels)
        return out.text_embeds, out.image_embeds

    def loss(self, tokens: torch.Tensor, mask: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        return self.model(
            input_ids=tokens, attention_mask=mask, pixel_values=pixels, return_loss=True
        ).loss


def test_clip() -> None:
    pixels = torch.randn(2, 3, 16, 16, requires_grad=True)
    check_equal(Clip(), "towers", TOKENS, pixels)
    check_equal(Clip(), "loss", TOKENS, PADDING, pixels)


def test_a_guard_of_a_large_model_notices_its_configuration() -> None:
    actor = LanguageModel(causal_lm("qwen2"))
    guard = trace(actor, "logits", TOKENS).guard
    assert guard is not None
    assert guard() is None
    actor.model.config._attn_implementation = "eager"  # type: ignore[union-attr]
    assert "._attn_implementation_internal' was 'sdpa'" in (guard() or "")
