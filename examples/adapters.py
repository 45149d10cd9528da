"""LoRA by peft, of a model whose weights are not there yet: adapters, and their names in files."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

PREFIX = "base_model.model."


def add_adapters(model: nn.Module, rank: int, folder: Path, seed: int) -> Any:
    """Give each linear layer inside of a model's layers an adapter; all else is frozen.

    So do the weights of all experts that are stacked in a tensor. (peft does this by itself for
    some models alone.) The adapters are in memory, though the model is on the meta device. They are
    the same on all ranks.

    Raises:
        SystemExit: peft is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise SystemExit("--lora needs peft: pip install peft") from error
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        target_parameters=stacked(model),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(folder),
    )
    adapted = peft.get_peft_model(model, settings)
    torch.manual_seed(seed)
    for name, parameter in list(adapted.named_parameters()):
        if "lora_" in name:  # as peft fills them
            value = torch.zeros(parameter.shape)
            if "lora_A" in name:
                nn.init.kaiming_uniform_(value, a=math.sqrt(5))
            owner, _, last = name.rpartition(".")
            setattr(adapted.get_submodule(owner), last, nn.Parameter(value))
    return adapted


def stacked(model: nn.Module) -> list[str]:
    """The names, below a layer's number, of parameters with the matrices of all experts."""
    return sorted(
        {
            re.sub(r"^.*\.\d+\.", "", name)
            for name, parameter in model.named_parameters()
            if ".experts." in name and parameter.dim() == 3
        }
    )


def name_in_model(name: str) -> str | None:
    """The name of a tensor of an adapted model in the model's folder; None for adapters."""
    return None if "lora_" in name else name.replace(".base_layer", "")


def name_in_adapter(name: str) -> str | None:
    """The name of a tensor of an adapted model in an adapter's folder; None for the model's."""
    return name.replace(".default", "") if "lora_" in name else None


def settings_of(adapted: Any) -> str:
    """The configuration of adapters, as peft reads it."""
    settings = adapted.peft_config["default"].to_dict()
    return json.dumps(
        {k: sorted(v) if isinstance(v, set) else v for k, v in settings.items()},
        indent=1,
        default=str,
    )
