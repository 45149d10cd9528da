"""Inputs on which a model is run once to be cut: small ones, if the user gives none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

ROWS, LENGTH = 1, 64
"""The shape of a batch of texts; it is shorter for a model that takes fewer positions."""


@runtime_checkable
class _NamesInput(Protocol):
    """A model that says what it takes, as those of transformers do."""

    main_input_name: str
    config: Any


def example_of(model: nn.Module) -> dict[str, Any]:
    """Inputs for a model of transformers.

    Raises:
        ValueError: it takes neither texts nor images, or is of another library.
    """
    base = model
    while not isinstance(base, _NamesInput) and len(children := list(base.children())) == 1:
        base = children[0]  # a model in a wrapper
    if isinstance(base, _NamesInput):
        settings: Mapping[str, Any] = base.config.to_dict()
        if base.main_input_name == "input_ids":
            longest = settings.get("max_position_embeddings") or settings.get("n_positions")
            ids = torch.zeros(ROWS, min(LENGTH, longest or LENGTH), dtype=torch.int64)
            names = ["input_ids"]
            names += ["decoder_input_ids"] if settings.get("is_encoder_decoder") else []
            return dict.fromkeys(names, ids)
        if base.main_input_name == "pixel_values" and isinstance(settings.get("image_size"), int):
            size = settings["image_size"]
            return {"pixel_values": torch.zeros(ROWS, settings.get("num_channels", 3), size, size)}
    raise ValueError(
        f"cg.cut_layers does not know what {type(model).__name__} takes; give it inputs, as "
        "example={name: tensor}, on which the model's forward can run"
    )
