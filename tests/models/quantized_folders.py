"""Tiny folders of quantized models, written by the documented packing of each format.

Each quantizer gives the tensors of a layer and the weight that they stand for, by a formula of its
own, in numpy. What libraries themselves make of such folders was compared once: see the guide.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
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


NF4 = (
    *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
)
"""The numbers of nf4 (Dettmers and others, "QLoRA", 2023, appendix E)."""


def nf4(weight: Tensor, is_nested: bool = False) -> Layer:
    """Blocks of the row that a matrix lies in, and their numbers' places; the first has the upper
    bits. With nested scales, these are places of a table, less their mean."""
    table, blocks = torch.tensor(NF4), weight.reshape(-1, SIZE)
    scale = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": SIZE, "dtype": "float32"}
    tensors = {"weight.quant_map": table}
    if is_nested:
        state |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": 0.375}
        numbers = torch.linspace(-1, 1, 256)
        runs = nn.functional.pad(scale - 0.375, (0, -len(scale) % 8)).view(-1, 8)
        most = runs.abs().amax(1)
        places = (runs / most[:, None])[..., None].sub(numbers).abs().argmin(-1)
        scale = (numbers[places] * most[:, None]).flatten()[: len(scale)] + 0.375
        tensors["weight.absmax"] = places.flatten()[: len(scale)].to(torch.uint8)
        tensors |= {"weight.nested_absmax": most, "weight.nested_quant_map": numbers}
    else:
        tensors["weight.absmax"] = scale
    levels = (blocks / scale[:, None])[..., None].sub(table).abs().argmin(-1)
    pairs = levels.to(torch.uint8).view(-1, 2)
    text = json.dumps(state | {"shape": list(weight.shape)}).encode()
    tensors |= {
        "weight": (pairs[:, :1] << 4 | pairs[:, 1:]),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8),
    }
    return Layer(tensors, (table[levels] * scale[:, None]).view(weight.shape))


def nf4_nested(weight: Tensor) -> Layer:
    return nf4(weight, is_nested=True)


def int8_columns(weight: Tensor) -> Layer:
    """LLM.int8's: a stored scale is the largest number of an output."""
    most = weight.abs().amax(1)
    levels = (weight / most[:, None] * 127).round().to(torch.int8)
    tensors = {"weight": levels, "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Layer(tensors, levels.float() * most[:, None] / 127)


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

_BYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
BYTES: dict[str, Form] = {
    "nf4": Form(_BYTES | {"bnb_4bit_use_double_quant": False}, nf4),
    "nf4, nested": Form(_BYTES | {"bnb_4bit_use_double_quant": True}, nf4_nested),
    "LLM.int8": Form({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8_columns),
}
"""Formats of bitsandbytes, whose tensors folders have in other shapes, or names, than layers."""


def is_quantized(path: str) -> bool:
    """True for the layers of a model that folders have quantized."""
    return "proj" in path or ".experts." in path


def write(model: nn.Module, folder: Path, form: Form) -> None:
    """Save a model of transformers with quantized layers; its weights become what these stand for.

    With it the model itself computes what the folder does: inputs of its layers are rounded.
    """
    saved: Any = model
    saved.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    numbers, tensors = dict(stored), dict(stored)
    for name, weight in stored.items():
        path, _, last = name.rpartition(".")
        if is_quantized(name) and last == "weight":
            layer = form.quantize(weight)
            del tensors[name]
            tensors |= {f"{path}.{own}": tensor for own, tensor in layer.tensors.items()}
            numbers[name] = layer.weight.contiguous()
    save_file(numbers, folder / "model.safetensors", {"format": "pt"})
    saved.load_state_dict(type(model).from_pretrained(folder).state_dict())
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_quantized(path) and form.rounded is not None:
            module.register_forward_pre_hook(_rounding(form.rounded))
        elif hasattr(module, "has_gate"):
            module.forward = MethodType(partial(_by_expert, form.rounded or _as_it_is), module)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = form.settings
    (folder / "config.json").write_text(json.dumps(config))


def _rounding(rounded: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,) = args
        return (x + (rounded(x) - x).detach() if x.requires_grad else rounded(x),)

    return hook


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _by_expert(
    rounded: Callable[[Tensor], Tensor], module: Any, x: Tensor, ids: Tensor, shares: Tensor
) -> Tensor:
    """Experts by their definition, with rounded inputs."""
    result = torch.zeros_like(x)
    for token, choice in np.ndindex(*ids.shape):
        expert = int(ids[token, choice])
        row = x[token : token + 1]
        row = row + (rounded(row) - row).detach()
        h = module._apply_gate(nn.functional.linear(row, module.gate_up_proj[expert]))
        h = h + (rounded(h) - h).detach()
        h = nn.functional.linear(h, module.down_proj[expert]) * shares[token, choice]
        result = result.index_add(0, torch.tensor([token]), h)
    return result


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of four bits without a sign."""


def mxfp4(weight: Tensor) -> Layer:
    """Microscaling: 32 neighbours share a power of two; the first of two has the lower bits."""
    table = torch.tensor((*E2M1, *(-number for number in E2M1)))
    grouped = weight.unflatten(-1, (-1, 32))
    power = (grouped.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    places = (grouped[..., None] / 2.0 ** power[..., None] - table).abs().argmin(-1)
    pairs = places.to(torch.uint8).unflatten(-1, (-1, 2))
    blocks = pairs[..., 0] | pairs[..., 1] << 4
    scales = (power.squeeze(-1) + 127).to(torch.uint8)
    numbers = (table[places] * 2.0**power).flatten(-2)
    return Layer({"blocks": blocks, "scales": scales}, numbers)


def write_mxfp4(model: nn.Module, folder: Path) -> None:
    """Save a GPT-OSS as its folders are: with stacked experts, whose weights lie turned."""
    saved: Any = model
    saved.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            layer = mxfp4(parameter.detach().transpose(1, 2))
            tensors |= {f"{name}_{own}": tensor for own, tensor in layer.tensors.items()}
            parameter.data.copy_(layer.weight.transpose(1, 2))
            del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
