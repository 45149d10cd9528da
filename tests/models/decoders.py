"""Tiny configurations of the decoders of transformers, by one table of sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 31, 8
LARGEST = 400_000
"""Parameters of a model that is still tiny."""

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES: Mapping[int, str] = {
    1: "n_group num_expert_group topk_group mamba_n_groups mamba_ngroups n_groups",
    2: "num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers "
    "n_shared_experts num_shared_experts num_decoder_layers num_encoder_layers "
    "num_experts_per_tok num_key_value_heads num_experts_per_token swa_num_key_value_heads "
    "linear_num_key_heads linear_num_heads num_blocks num_kv_heads moe_topk moe_k zero_expert_num "
    "num_global_key_value_heads top_k_experts kv_n_heads moe_top_k indexer_n_heads "
    "index_n_heads index_topk hc_count heads_per_ngram split_ngram_parts num_codebooks",
    4: "num_attention_heads n_head num_heads n_heads decoder_attention_heads "
    "encoder_attention_heads swa_num_attention_heads head_dim swa_head_dim d_kv dim_head "
    "num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim "
    "qk_nope_head_dim v_head_dim rotary_dim linear_head_dim linear_num_value_heads "
    "linear_key_head_dim linear_value_head_dim prompt_length prompt_types segment_types "
    "mamba_n_heads mamba_num_heads mamba_d_state ssm_state_size state_size mamba_chunk_size "
    "chunk_size hidden_size_per_layer_input pronunciation_embed_dim shape_embed_dim "
    "global_head_dim index_head_dim indexer_head_dim linear_conv_kernel_dim hc_lowrank "
    "make_ngram_vocab_size_divisible_by attention_head_size local_attn_chunk_length "
    "lsh_attn_chunk_length",
    7: "pronunciation_vocab_size shape_vocab_size",
    8: "kv_lora_rank q_lora_rank sliding_window local_attention mamba_d_head mamba_head_dim "
    "sliding_window_size window_size attention_window_size lora_rank hidden_rank "
    "attn_lora_rank",
    16: "hidden_size d_model n_embd dim emb_dim embedding_size input_embedding_size "
    "decoder_hidden_size word_embed_proj_dim moe_intermediate_size "
    "shared_expert_intermediate_size expert_ffn_hidden_size shared_experts_intermediate_size "
    "router_hidden_size lru_width image_size nope_hidden_size output_embedding_size "
    "hidden_size_global",
    VOCABULARY: "vocab_size n_words vocab_size_per_layer_input n_token",
    32: "intermediate_size ffn_dim n_inner decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dff "
    "d_inner dim_ff mamba_d_ssm attention_hidden_size dense_intermediate_size",
    64: "max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx",
}
_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names.split()}

_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_ALL_HEADS = {"num_key_value_heads": 4}
_CAUSAL = {"is_decoder": True}
_GLOBAL_HEADS = {"global_head_dim": 8}
_WINDOWED = {
    **_ALL_HEADS,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 8,
    "swa_kv_lora_rank": 8,
    "swa_head_dim": 8,
    "swa_qk_nope_head_dim": 4,
    "swa_v_head_dim": 4,
}
"""Latent attention whose windows have sizes of their own."""
_INDEXED = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 4,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "ple_layer_ids": [1],
    "ngram_vocab_size_base": VOCABULARY,
}
"""An index of blocks of keys, and embeddings of pairs and triples of tokens."""
_NO_LAYER_SHARES = {"num_kv_shared_layers": 0, "intermediate_size": 32}
_NO_INPUT_OF_LAYERS = {
    "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
}
_EXCEPTIONS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        [
            "axk1",
            "axk2",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "minicpm3",
            "youtu",
            "longcat_flash",
            "bailing_hybrid",
            "kimi_linear",
        ],
        _ALL_HEADS,
    ),
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROTARY),
    },
    "cpmant": {"init_std": 0.02},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8}},
    "deepseek_v2": {**_ALL_HEADS, "num_experts_per_tok": 2},
    **dict.fromkeys(("bert", "electra", "ernie", "rembert", "roc_bert", "roformer"), _CAUSAL),
    "bamba": {"attn_layer_indices": [1]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_head": 8},
    **{kind: {"text_config": _GLOBAL_HEADS} for kind in ("gemma4", "gemma4_unified")},
    **dict.fromkeys(["gemma4_text", "gemma4_unified_text"], _GLOBAL_HEADS),
    "blt": {"encoder_hash_byte_group_vocab": VOCABULARY},
    "dots3_note": {
        "text_config": _WINDOWED,
        "vision_config": {"adapter_in_dim": 16, "adapter_out_dim": 16},
        "audio_config": {"adapter_input_size": 16, "adapter_out_dim": 16},
    },
    "dots3_note_text": _WINDOWED,
    "gemma4_assistant": _NO_INPUT_OF_LAYERS,
    "gemma3n": {"text_config": _NO_LAYER_SHARES},
    "gemma3n_text": _NO_LAYER_SHARES,
    "got_ocr2": {"vision_config": {"output_channels": 8, "mlp_dim": 32}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 4},
    "hunyuan_v1_moe": {"head_dim": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 4},
    "nemotron": {"num_key_value_heads": 2},
    "phi4_multimodal": {
        "audio_config": dict.fromkeys(
            ("nemo_conv_channels", "ext_pw_out_channel", "depthwise_separable_out_channel"), 16
        )
    },
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "reformer": {
        **_CAUSAL,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [2, LENGTH // 2],
        "axial_pos_embds_dim": [8, 8],
        "feed_forward_size": 32,
        "num_buckets": 2,
        "hash_seed": 0,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "rwkv": {"attention_hidden_size": 16},
    "xlstm": {"hidden_size": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1]},
    "zaya": {"num_experts_per_tok": 1},
}
"""What single types need beside the sizes."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"gemma4_assistant": _NO_INPUT_OF_LAYERS}
"""What a type's configuration refuses to leave out."""
BESIDE_ANOTHER = ("gemma4_assistant", "gemma4_unified_assistant")
"""Types of models that only run beside a main model, whose keys and values they read."""


class ImageTower(transformers.PreTrainedModel):  # type: ignore[misc]
    """What stands for the tower of images of gemma3n, which a text does not reach.

    Its own comes from another library.
    """

    config_class = transformers.models.gemma3n.Gemma3nVisionConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed = nn.Linear(3, config.hidden_size)
        self.post_init()


transformers.AutoModel.register(ImageTower.config_class, ImageTower, exist_ok=True)


def types() -> tuple[str, ...]:
    """The types of model that transformers lists as causal language models."""
    from transformers.models.auto import modeling_auto

    return tuple(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def config_of(kind: str) -> Any:
    """The configuration of a type's tiny model."""
    cls = transformers.CONFIG_MAPPING[kind]
    tiny = _tiny(cls(**_DEFAULTS.get(kind, {})).to_dict())
    _join(tiny, _EXCEPTIONS.get(kind, {}))
    config = cls(**tiny)
    # Of a type with images or sounds, the part that is the decoder.
    parts = [getattr(config, name) for name in config.sub_configs]
    return next((part for part in parts if type(part) is class_of(kind).config_class), config)


def class_of(kind: str) -> Any:
    """The class of a type's models."""
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    return getattr(transformers, names if isinstance(names, str) else names[0])


def decoder(kind: str) -> nn.Module:
    """A type's tiny model from seed 0, in training, without dropout.

    Raises:
        ValueError: it is not tiny.
    """
    cls = class_of(kind)
    with torch.device("meta"):
        count = sum(p.numel() for p in cls(config_of(kind)).parameters())
    if count > LARGEST:
        raise ValueError(f"the table makes a model of {count} parameters")
    torch.manual_seed(0)
    model: nn.Module = cls(config_of(kind))
    return model.train()


def _tiny(config: Mapping[str, Any]) -> dict[str, Any]:
    tiny: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and "model_type" in value:
            tiny[name] = {"model_type": value["model_type"], **_tiny(value)}
        elif name in _SPECIAL:
            tiny[name] = _SPECIAL[name]
        elif isinstance(value, bool):
            continue
        elif name in _SIZE_OF and isinstance(value, int):
            tiny[name] = _SIZE_OF[name]
        elif isinstance(value, float) and ("drop" in name or name.endswith("jitter_noise")):
            tiny[name] = 0.0
    return tiny | _kinds(config)


def _kinds(config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers of each kind, in the order of their first ones; nothing if all are of one."""
    listed = {name: config.get(name) for name in ("layer_types", "mlp_layer_types")}
    kinds = {name: list(dict.fromkeys(values)) for name, values in listed.items() if values}
    count = max(map(len, kinds.values()), default=1)
    if count == 1:
        return {}
    lists = {name: (values * count)[:count] for name, values in kinds.items()}
    return {**lists, "num_hidden_layers": count}


def _join(tiny: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        inner = tiny.get(name)
        if isinstance(inner, dict) and isinstance(value, Mapping):
            _join(inner, value)
        else:
            tiny[name] = value
