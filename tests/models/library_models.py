"""Tiny models whose folders differ from their modules in names or shapes, with random weights."""

from __future__ import annotations

from typing import Any

import torch

from .families import transformers

TEXT: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = TEXT | {"num_key_value_heads": 2}
SPARSE = GROUPED | {"num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
EXPERTS = SPARSE | {"num_experts": 4, "moe_intermediate_size": 12}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Mistral": GROUPED | {"sliding_window": None},
    "Phi3": GROUPED,
    "Mixtral": SPARSE | {"num_local_experts": 4},
    "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 12},
    "Qwen3Moe": EXPERTS | {"head_dim": 4},
    "Olmoe": SPARSE | {"num_experts": 4},
    "GraniteMoe": SPARSE | {"num_local_experts": 4},
    "DeepseekV3": SPARSE
    | LATENT
    | {"n_routed_experts": 4, "moe_intermediate_size": 12, "first_k_dense_replace": 1},
    "GptOss": SPARSE | {"num_local_experts": 4, "head_dim": 4, "sliding_window": 8},
    "Glm4Moe": SPARSE
    | {
        "n_routed_experts": 4,
        "moe_intermediate_size": 12,
        "head_dim": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "GPTNeoX": TEXT,
    "Gemma3": GROUPED | {"head_dim": 4},
    "Bloom": {"vocab_size": 31, "hidden_size": 16, "n_layer": 2, "n_head": 4},
    "Falcon": TEXT | {"new_decoder_architecture": False, "multi_query": True},
}
FEW = ("Mixtral", "GPTNeoX", "Gemma3ForConditionalGeneration")
"""The kinds that a default run takes: merged experts, names, and a prefix of several models."""
CASES = (*CONFIGS, "Gemma3ForConditionalGeneration", "Qwen2VLForConditionalGeneration")


def library_model(case: str) -> Any:
    """A model whose weights are all random, so that no two are alike."""
    model = empty_library_model(case).eval()
    generator = torch.Generator().manual_seed(0)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def empty_library_model(case: str) -> Any:
    """The model as its class makes it, in memory or on the meta device."""
    if case in CONFIGS:
        config = "Gemma3Text" if case == "Gemma3" else case
        made = getattr(transformers, f"{config}Config")(**CONFIGS[case])
        return getattr(transformers, f"{case}ForCausalLM")(made)
    if case.startswith("Gemma3"):
        text = CONFIGS["Gemma3"]
        config = transformers.Gemma3Config(
            text_config=text, vision_config=IMAGES, mm_tokens_per_image=4
        )
        return transformers.Gemma3ForConditionalGeneration(config)
    text = GROUPED | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}
    images = {"embed_dim": 16, "hidden_size": 16, "depth": 1, "num_heads": 2, "mlp_ratio": 1}
    return transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(text_config=text, vision_config=images)
    )
