"""Read about the weights in a folder of `save_pretrained`, before any of them is loaded.

The module does not import torch, since the front of the server runs without it.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

import cg


def places(folder: Path) -> dict[str, str]:
    """The file of each tensor, by its name.

    Raises:
        FileNotFoundError: the folder has no weights in safetensors.
        SafetensorError: the file is damaged.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    with safe_open(folder / "model.safetensors", "np") as stored:
        return dict.fromkeys(stored.keys(), "model.safetensors")


def quantization(folder: Path) -> str | None:
    """The library in whose format a folder has quantized weights; None if they are plain.

    Missing and damaged files are left to the code that loads weights.

    Raises:
        ValueError: the format is not read; or a weight has the element type of one, and the
            configuration names none.
    """
    method = cg.quantization(folder)
    reason = None if method else _quantized_weight(folder)
    if reason:
        raise ValueError(
            f"the weights in {folder} are quantized: {reason}, and config.json has no "
            "quantization_config, which would say what they stand for. Give a folder of the same "
            "model with weights in bfloat16, float16 or float32"
        )
    return method


def _quantized_weight(folder: Path) -> str | None:
    """A tensor whose element type shows that it is quantized; None if there is none.

    Integers count in weights alone, since other tensors, such as masks and positions, may be
    integers.
    """
    files: dict[str, list[str]] = {}
    try:
        for name, file in places(folder).items():
            files.setdefault(file, []).append(name)
        for file, names in files.items():
            with safe_open(folder / file, "np") as stored:
                for name in names:
                    dtype = str(stored.get_slice(name).get_dtype())
                    is_weight = "weight" in name.rpartition(".")[2]
                    if dtype.startswith(("F8", "F6", "F4")) or (is_weight and dtype[0] in "IU"):
                        return f"'{name}' is {dtype}"
    except (OSError, ValueError, KeyError, SafetensorError):
        pass
    return None
