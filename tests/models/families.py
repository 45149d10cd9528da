"""Tiny models of the architectures that are cut, with inputs for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 31, 7
FAMILIES = (
    "Llama",
    "Qwen2",
    "Qwen3",
    "Mistral",
    "Gemma",
    "Mixtral",
    "GPT2",
    "Bert",
    "ViT",
)
TIED = ("Gemma", "GPT2", "Bert")
"""Those whose head is their embedding."""


def model_of(family: str, layers: int = 4, **config: Any) -> nn.Module:
    """A model in evaluation mode, from seed 0."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0}
    head = f"{family}ForCausalLM"
    if family == "ViT":
        sizes |= {"image_size": 16, "patch_size": 8, "num_labels": 5}
        head = "ViTForImageClassification"
    elif family == "GPT2":
        sizes = {"n_embd": 16, "n_head": 4, "n_positions": 32, "n_layer": layers}
        sizes |= {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
        head = "GPT2LMHeadModel"
    elif family == "Bert":
        sizes |= text
        head = "BertForMaskedLM"
    else:
        sizes |= text | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
        if family in ("Gemma", "Qwen3"):
            sizes["head_dim"] = 4
        if family == "Mixtral":
            sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    made = getattr(transformers, f"{family}Config")(**{**sizes, **config})
    return getattr(transformers, head)(made).eval()  # type: ignore[no-any-return]


def inputs_of(family: str, rows: int = 4) -> dict[str, torch.Tensor]:
    """Images, or texts of which some have padding."""
    generator = torch.Generator().manual_seed(1)
    if family == "ViT":
        return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator)}
    ids = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, LENGTH - 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}
