"""Tiny folders of quantized models, written by the documented packing of each format.

Each quantizer gives the tensors of a layer and the weight that they stand for, by a formula of its
own, in numpy. What libraries themselves make of such folders was compared once: see the guide.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SIZE = 16
"""Neighbours that share a scale, where a format has such."""
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The neighbour that each 4 bits of a word of AWQ have, from the lowest on."""


@dataclass(frozen=True)
class Layer:
    """The tensors of a quantized layer, and the weight that they stand for, float32."""

    tensors: dict[str, Tensor]
    weight: Tensor


@dataclass(frozen=True)
class Form:
    """A format: its configuration, its tensors, and what it does with a layer's input."""

    settings: Mapping[str, Any]
    quantize: Callable[[Tensor], Layer]
    rounded: Callable[[Tensor], Tensor] | None = None


def _numbers(integers: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(integers))


def packed(integers: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Integers [rows, columns], packed along columns: word by word, from the lowest bits on."""
    rows = integers.numpy().astype(np.uint64)
    count = 32 // bits
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % count)))
    words = np.zeros((len(rows), rows.shape[1] // count), np.uint64)
    for place, neighbour in enumerate(places or range(count)):
        words |= rows[:, neighbour::count] << np.uint64(bits * place)
    return _numbers(words.astype(np.uint32).view(np.int32))


def float8_blocks(weight: Tensor, rows: int = SIZE, columns: int = SIZE) -> Layer:
    levels, numbers = torch.zeros_like(weight).to(torch.float8_e4m3fn), torch.zeros_like(weight)
    scales = torch.zeros(-(-len(weight) // rows), -(-weight.shape[1] // columns))
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            box = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[box].abs().max() / 448
            levels[box] = (weight[box] / scales[i, j]).to(torch.float8_e4m3fn)
            numbers[box] = levels[box].float() * scales[i, j]
    return Layer({"weight": levels, "weight_scale_inv": scales}, numbers)


def float8_rows(weight: Tensor) -> Layer:
    scale = weight.abs().amax(1, keepdim=True) / 448
    levels = (weight / scale).to(torch.float8_e4m3fn)
    return Layer({"weight": levels, "weight_scale": scale}, levels.float() * scale)


def float8_tensor(weight: Tensor) -> Layer:
    scale = (weight.abs().amax() / 448).reshape(1)
    levels = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": levels, "weight_scale": scale, "input_scale": torch.tensor([0.01])}
    return Layer(tensors, levels.float() * scale)


def int8_rows(weight: Tensor) -> Layer:
    scale = weight.abs().amax(1, keepdim=True) / 127
    levels = (weight / scale).round().to(torch.int8)
    return Layer({"weight": levels, "weight_scale": scale}, levels.float() * scale)


def packed_groups(weight: Tensor) -> Layer:
    """Compressed-tensors' symmetric groups of 4 bits, around 8."""
    grouped = weight.unflatten(1, (-1, SIZE))
    scale = grouped.abs().amax(-1) / 7.5
    levels = (grouped / scale[..., None]).round().clamp(-8, 7).flatten(1)
    tensors = {
        "weight_packed": packed(levels + 8, 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    return Layer(tensors, levels * scale.repeat_interleave(SIZE, 1))


def _uneven(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Levels from 0 to 15, zero points and scales of groups of inputs: [outputs, ...]."""
    grouped = weight.unflatten(1, (-1, SIZE))
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(1, 15)
    levels = (grouped / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    return levels.flatten(1), zero, scale


def packed_uneven(weight: Tensor) -> Layer:
    levels, zero, scale = _uneven(weight)
    tensors = {
        "weight_packed": packed(levels, 4),
        "weight_scale": scale,
        "weight_zero_point": packed(zero.t(), 4).t().contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    spread = (each.repeat_interleave(SIZE, 1) for each in (zero, scale))
    return Layer(tensors, (levels - next(spread)) * next(spread))


def gptq(weight: Tensor, by_activation: bool = False) -> Layer:
    """GPTQ's groups; with the order of activations, of inputs that are no neighbours."""
    inputs = weight.shape[1]
    order = torch.arange(inputs)
    if by_activation:
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    levels, zero, scale = _uneven(weight[:, order])
    of_input = torch.empty(inputs, dtype=torch.int32)
    of_input[order] = torch.arange(inputs, dtype=torch.int32) // SIZE
    levels[:, order] = levels.clone()
    groups = of_input.long()
    tensors = {
        "qweight": packed(levels, 4).t().contiguous(),
        "qzeros": packed(zero.t() - 1, 4),
        "scales": scale.t().half().contiguous(),
        "g_idx": of_input,
    }
    return Layer(tensors, (levels - zero[:, groups]) * scale[:, groups])


def gptq_by_activation(weight: Tensor) -> Layer:
    return gptq(weight, by_activation=True)


def awq(weight: Tensor) -> Layer:
    levels, zero, scale = _uneven(weight)
    tensors = {
        "qweight": packed(levels.t(), 4, AWQ_PLACES),
        "qzeros": packed(zero.t(), 4, AWQ_PLACES),
        "scales": scale.t().half().contiguous(),
    }
    spread = [each.repeat_interleave(SIZE, 1) for each in (zero, scale)]
    return Layer(tensors, (levels - spread[0]) * spread[1])


def float8_input(x: Tensor, size: int | None = None) -> Tensor:
    """An input in float8, by a scale for each token, or for so many of its entries."""
    grouped = x.unflatten(-1, (-1, size or x.shape[-1]))
    scale = grouped.abs().amax(-1, keepdim=True) / 448
    return ((grouped / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def static_input(x: Tensor) -> Tensor:
    return (x / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.01


def int8_input(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return (x / scale).round().clamp(-128, 127) * scale


def compressed(stored: str, weights: Mapping[str, Any], **inputs: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"symmetric": True, "dynamic": False, **weights},
                "input_activations": {"num_bits": 8, "symmetric": True, **inputs}
                if inputs
                else None,
            }
        },
    }


_FLOAT, _INT = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}
_GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": SIZE}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": SIZE, "sym": False}
_FP8 = {"quant_method": "fp8", "weight_block_size": [SIZE, SIZE], "fmt": "e4m3"}
FORMS: dict[str, Form] = {
    "fp8": Form(
        _FP8 | {"activation_scheme": "dynamic"}, float8_blocks, lambda x: float8_input(x, SIZE)
    ),
    "float8 channels": Form(
        compressed(
            "float-quantized",
            _FLOAT | {"strategy": "channel"},
            **(_FLOAT | {"strategy": "token", "dynamic": True}),
        ),
        float8_rows,
        float8_input,
    ),
    "float8 tensor": Form(
        compressed(
            "float-quantized",
            _FLOAT | {"strategy": "tensor"},
            **(_FLOAT | {"strategy": "tensor", "dynamic": False}),
        ),
        float8_tensor,
        static_input,
    ),
    "int8": Form(
        compressed(
            "int-quantized",
            _INT | {"strategy": "channel"},
            **(_INT | {"strategy": "token", "dynamic": True}),
        ),
        int8_rows,
        int8_input,
    ),
    "packed": Form(compressed("pack-quantized", _GROUPS), packed_groups),
    "packed, uneven": Form(
        compressed("pack-quantized", _GROUPS | {"symmetric": False}), packed_uneven
    ),
    "gptq": Form(_GPTQ | {"desc_act": False}, gptq),
    "gptq by activation": Form(_GPTQ | {"desc_act": True}, gptq_by_activation),
    "awq": Form({"quant_method": "awq", "bits": 4, "group_size": SIZE, "version": "gemm"}, awq),
}
"""The formats, by name."""


def is_quantized(path: str) -> bool:
    """True for the layers of a model that folders have quantized."""
    return "proj" in path


def write(model: nn.Module, folder: Path, form: Form) -> None:
    """Save a model of transformers with quantized layers; its weights become what these stand for.

    With it the model itself computes what the folder does: inputs of its layers are rounded.
    """
    saved: Any = model
    saved.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    tensors = {
        name: tensor
        for name, tensor in stored.items()
        if not is_quantized(name) or name.endswith("bias")
    }
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_quantized(path):
            layer = form.quantize(module.weight.detach())
            tensors |= {f"{path}.{name}": tensor for name, tensor in layer.tensors.items()}
            module.weight.data.copy_(layer.weight)
            if form.rounded is not None:
                module.register_forward_pre_hook(_rounding(form.rounded))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = form.settings
    (folder / "config.json").write_text(json.dumps(config))


def _rounding(rounded: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,) = args
        return (x + (rounded(x) - x).detach() if x.requires_grad else rounded(x),)

    return hook
