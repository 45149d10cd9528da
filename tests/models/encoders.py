"""Tiny models of transformers that are no decoders: of images, of sound, and encoder-decoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 31, 7
Inputs = dict[str, Any]

_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
_IMAGES = {**_SIZES, "num_hidden_layers": 2, "image_size": 16, "patch_size": 8}
_TEXTS = {**_SIZES, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
_TWO_LISTS = {
    **_SPECIAL,
    "vocab_size": VOCABULARY,
    "d_model": 16,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")},
}


def ids(generator: torch.Generator, rows: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def _images(generator: torch.Generator, rows: int) -> Inputs:
    return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator, dtype=torch.float64)}


def _classified_images(generator: torch.Generator, rows: int) -> Inputs:
    return {
        **_images(generator, rows),
        "labels": torch.randint(5, (rows,), generator=generator),
    }


def _captions(generator: torch.Generator, rows: int) -> Inputs:
    return {
        "input_ids": ids(generator, rows),
        **_images(generator, rows),
        "return_loss": True,
    }


def _masked_texts(generator: torch.Generator, rows: int) -> Inputs:
    texts = ids(generator, rows)
    mask = torch.ones_like(texts)
    mask[::2, -2:] = 0  # in each microbatch as many
    return {"input_ids": texts, "attention_mask": mask, "labels": ids(generator, rows)}


def _translations(generator: torch.Generator, rows: int) -> Inputs:
    return {**_masked_texts(generator, rows), "labels": ids(generator, rows, 5), "use_cache": False}


def _spectrograms(generator: torch.Generator, rows: int) -> Inputs:
    return {
        "input_features": torch.randn(rows, 8, 24, generator=generator, dtype=torch.float64),
        "labels": ids(generator, rows, 5),
        "use_cache": False,
    }


def _waves(generator: torch.Generator, rows: int) -> Inputs:
    return {
        "input_values": torch.randn(rows, 400, generator=generator, dtype=torch.float64),
        "labels": torch.randint(3, (rows,), generator=generator),
    }


def _squares(output: Any) -> torch.Tensor:
    pooled: torch.Tensor = output.pooler_output
    return pooled.square().mean()


def _own_loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


@dataclass(frozen=True)
class Kind:
    """A type of model.

    Attributes:
        head: the name of its class.
        sizes: of its configuration.
        inputs: of so many rows.
        loss: of what it gives.
    """

    head: str
    sizes: Mapping[str, Any]
    inputs: Callable[[torch.Generator, int], Inputs]
    loss: Callable[[Any], torch.Tensor] = field(default=_own_loss)

    def model(self) -> nn.Module:
        """From seed 0, in training, without dropout, in double precision."""
        torch.manual_seed(0)
        cls = getattr(transformers, self.head)
        config = cls.config_class(
            **{**_without_dropout(cls.config_class().to_dict()), **self.sizes}
        )
        model: nn.Module = cls(config).train()
        return model.double()  # so that nothing but an error differs


def _without_dropout(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: 0.0 for name, value in config.items() if "drop" in name and value}


KINDS: Mapping[str, Kind] = {
    "bert": Kind("BertForMaskedLM", {**_TEXTS, **_SPECIAL}, _masked_texts),
    "vit": Kind("ViTForImageClassification", {**_IMAGES, "num_labels": 5}, _classified_images),
    "siglip_vision": Kind("SiglipVisionModel", _IMAGES, _images, _squares),
    "clip_vision": Kind("CLIPVisionModel", _IMAGES, _images, _squares),
    "clip": Kind(
        "CLIPModel",
        {
            "vision_config": _IMAGES,
            "text_config": {**_TEXTS, **_SPECIAL, "max_position_embeddings": 32},
            "projection_dim": 16,
        },
        _captions,
    ),
    "whisper": Kind(
        "WhisperForConditionalGeneration",
        {**_TWO_LISTS, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16},
        _spectrograms,
    ),
    "wav2vec2": Kind(
        "Wav2Vec2ForSequenceClassification",
        {
            **_SIZES,
            "num_hidden_layers": 2,
            "conv_dim": (8, 8),
            "conv_kernel": (10, 3),
            "conv_stride": (5, 2),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "classifier_proj_size": 8,
            "num_labels": 3,
            "apply_spec_augment": False,
        },
        _waves,
    ),
    "t5": Kind(
        "T5ForConditionalGeneration",
        {
            **_SPECIAL,
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 32,
            "num_heads": 4,
            "num_layers": 2,
            "num_decoder_layers": 2,
        },
        _translations,
    ),
    "bart": Kind(
        "BartForConditionalGeneration",
        {**_TWO_LISTS, "max_position_embeddings": 32},
        _translations,
    ),
}
