"""Open a model to be served: a folder, or a configuration for random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PretrainedConfig

from .decoders import decoder, stored_decoder
from .gpt import GptConfig, gpt, read_checkpoint
from .lora import Adapter
from .parts import Model
from .weights import Drawn


def open_model(
    source: Path | PretrainedConfig | GptConfig, seed: int = 0, adapters: Sequence[Adapter] = ()
) -> Model:
    """The model of a folder, or one of random weights.

    Args:
        source: a folder in transformers' format; a folder of checkpoints that
            examples/train_gpt.py has written; a configuration of either, for random weights.
        seed: of random weights, which are the same however the model is cut.
        adapters: of the model, which requests may ask for.

    Raises:
        FileNotFoundError: the folder has no model.
        ValueError: the model has something that the engine does not serve, or is quantized; or an
            adapter is not of its layers.
    """
    is_own = isinstance(source, GptConfig) or (
        isinstance(source, Path) and (source / "latest").exists()
    )
    if is_own and adapters:
        raise ValueError("--lora is for models of transformers")
    if isinstance(source, GptConfig):
        return gpt(source, Drawn(seed, 0.08))
    if isinstance(source, PretrainedConfig):
        weights = Drawn(seed, source.to_dict().get("initializer_range", 0.02))
        return decoder(source, weights, source.eos_token_id, adapters)
    if (source / "latest").exists():
        return gpt(*read_checkpoint(source))
    if not (source / "config.json").exists():
        raise FileNotFoundError(
            f"{source} holds no model: neither config.json of transformers nor checkpoints of "
            "examples/train_gpt.py"
        )
    return stored_decoder(source, adapters)
