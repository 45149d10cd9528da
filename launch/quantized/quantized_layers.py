"""Have a model keep the linear layers quantized that its folder has quantized."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ..checkpoints.weights import Weights
from ..conversions.conversion import StoredType
from .dequantize import FLOATS, takes
from .quantized_linear import QuantizedLinear
from .readers import READABLE, quantized_folder
from .weight_format import WeightFormat

EXPERT = re.compile(r"\.experts\.\d+\.")
"""In the names of tensors of one of several experts."""


def keep_quantized(model: nn.Module, weights: Weights) -> frozenset[str]:
    """Have a model keep the linear layers quantized that a folder of weights has quantized.

    ```python
    weights = cg.pretrained(folder)
    with cg.empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    cg.keep_quantized(model, weights)
    weights.check(model)
    ```

    Each such layer is replaced by one whose tensors have the names and element types of the folder.
    They stay as they are: an actor holds them, and checkpoints have them. The layer multiplies by
    the numbers that they stand for. Plans of the model (`cg.plans`) cut them as they cut plain
    weights. Layers that the folder has as plain numbers stay as they are. Without quantized layers
    in the folder, nothing is changed.

    Formats, by `quant_method` in config.json: `fp8` in blocks of 128 by 128, as of DeepSeek and
    Qwen; `compressed-tensors` as float-quantized, int-quantized, naive-quantized and
    pack-quantized; `gptq`; `awq`.

    Args:
        model: of transformers, on the meta device.
        weights: of `cg.pretrained`.

    Returns:
        The paths of the tensors of quantized layers, scales included, and biases not.

    Raises:
        ValueError: the folder has a format that is not read, or quantized experts, or tensors that
            do not fit the model's layers.
    """
    folder = quantized_folder(weights.folder)
    if folder is None:
        return frozenset()
    layers = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and not isinstance(module, QuantizedLinear)
    }
    chosen: dict[str, WeightFormat] = {}
    for path, module in layers.items():
        classes = tuple(cls.__name__ for cls in type(module).__mro__)
        weight_format = folder.choose(path, classes)
        if weight_format is not None:
            chosen[path] = weight_format
    types = _types(model, weights, chosen)
    kept: list[str] = []
    for path, weight_format in chosen.items():
        own = _present(path, weight_format, types)
        if own is None:
            continue
        _check(weights.folder, path, layers[path], own, types)
        if own.index and not own.by_index:
            _check_groups(path, own, weights)
        tensors = {name: types[f"{path}.{name}"] for name in own.names}
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, QuantizedLinear(layers[path], own, tensors))
        kept += [f"{path}.{tensor}" for tensor in tensors]
    return frozenset(kept)


def _check_groups(path: str, weight_format: WeightFormat, weights: Weights) -> None:
    """Compare the stored group of each input with that of its neighbours.

    Raises:
        ValueError: groups are no neighbours, though the configuration says so.
    """
    own = f".{path}.{weight_format.index}"
    named = (name for name in weights.files if own.endswith(f".{name}") or f".{name}".endswith(own))
    name = next(named)
    file = weights.files[name]
    with file.opened() as read:
        groups = read(name, (slice(0, file.shapes[name][0]),)).long()
    size = weight_format.inputs_per_scale or len(groups)
    if not torch.equal(groups, torch.arange(len(groups)) // size):
        raise ValueError(
            f"'{name}' in {weights.folder} has groups of inputs that are no neighbours, and its "
            "config.json says that they are: set desc_act to true there"
        )


def _types(
    model: nn.Module, weights: Weights, chosen: Mapping[str, WeightFormat]
) -> Mapping[str, StoredType]:
    """The types of stored tensors, by the names that the model would have for them."""
    experts = next((name for name in weights.files if _is_quantized_expert(name, weights)), None)
    if experts is not None and not any(EXPERT.search(f".{path}.") for path in chosen):
        raise ValueError(
            f"the weights in {weights.folder} are quantized, with those of experts, such as "
            f"'{experts}', which the model stacks: quantized experts are not read. {READABLE}"
        )
    names = [f"{path}.{name}" for path, own in chosen.items() for name in own.names]
    return weights.types(model, names)


def _is_quantized_expert(name: str, weights: Weights) -> bool:
    """True for a tensor of one of several experts that has no plain numbers."""
    dtype = weights.files[name].dtypes[name]
    return EXPERT.search(name) is not None and dtype not in FLOATS


def _present(
    path: str, weight_format: WeightFormat, types: Mapping[str, StoredType]
) -> WeightFormat | None:
    """The format of a layer by what is stored of it; None if its weight is plain."""

    def has(name: str) -> bool:
        return f"{path}.{name}" in types

    if not has(weight_format.scale):
        return None
    if weight_format.index and not weight_format.by_index and not has(weight_format.index):
        return replace(weight_format, index="")
    return weight_format


def _check(
    folder: Path,
    path: str,
    layer: nn.Linear,
    weight_format: WeightFormat,
    types: Mapping[str, StoredType],
) -> None:
    """Compare what is stored of a layer with its sizes.

    Raises:
        ValueError: something is missing, or of another size.
    """
    missing = [name for name in weight_format.names if f"{path}.{name}" not in types]
    if missing:
        raise ValueError(
            f"{folder} lacks '{path}.{missing[0]}', which {weight_format.name} has: save the model "
            "with the library of its format"
        )
    sizes = layer.out_features, layer.in_features
    for name in weight_format.names:
        stored = types[f"{path}.{name}"]
        wanted = weight_format.shape(name, *sizes)
        if wanted is not None and stored.shape not in wanted:
            raise ValueError(
                f"'{path}.{name}' is {list(stored.shape)} in {folder}, and {weight_format.name} "
                f"of {sizes[1]} inputs and {sizes[0]} outputs has "
                f"{' or '.join(str(list(shape)) for shape in wanted)}"
            )
        if not takes(weight_format, name, stored.dtype):
            raise ValueError(
                f"'{path}.{name}' is {stored.dtype} in {folder}, which {weight_format.name} has not"
            )
