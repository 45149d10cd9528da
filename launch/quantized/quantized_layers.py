"""Have a model keep the layers and experts quantized that its folder has quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from ...tracer.method.quantized.weight_format import WeightFormat
from ..checkpoints.weights import Weights
from ..conversions.conversion import StoredType
from ..conversions.hugging_face import library_model
from .expert_layers import keep_experts
from .quantized_linear import QuantizedLinear
from .readers import QuantizedFolder, quantized_folder
from .stored_layers import check_stored, in_detail


def keep_quantized(model: nn.Module, weights: Weights) -> frozenset[str]:
    """Have a model keep the layers and experts quantized that a folder of weights has quantized.

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

    Weights of experts that a model stacks become modules, whose tensors are those of all experts,
    stacked. They are computed as `cg.cut_layers` has experts computed.

    Formats, by `quant_method` in config.json: `fp8` in blocks of 128 by 128, as of DeepSeek and
    Qwen; `compressed-tensors` as float-quantized, int-quantized, naive-quantized and
    pack-quantized; `gptq`; `awq`; `bitsandbytes`; `mxfp4`.

    Args:
        model: of transformers, on the meta device; it may have adapters of peft, which have to be
            there first if they adapt experts.
        weights: of `cg.pretrained`; with adapters, by names without them (`rename=`).

    Returns:
        The paths of the tensors of quantized layers, scales included, and biases not.

    Raises:
        ValueError: the folder has a format that is not read, or experts that are stacked in a way
            that is not, or tensors that do not fit the model's layers.
    """
    folder, inner = quantized_folder(weights.folder), library_model(model)
    if folder is None:
        return frozenset()
    if inner is not None and inner is not model:  # adapters are around it
        path = next(path for path, module in model.named_modules() if module is inner)
        return frozenset(f"{path}.{name}" for name in keep_quantized(inner, weights))
    chosen, layers = _chosen(model, weights, folder)
    names = [f"{path}.{name}" for path, own in chosen.items() for name in own.names]
    types = weights.types(model, names)
    kept = keep_experts(model, weights, folder)
    formats = {path: _present(path, own, types) for path, own in chosen.items()}
    present = {path: own for path, own in formats.items() if own is not None}
    for path, own in in_detail(model, present, weights).items():
        sizes = layers[path].out_features, layers[path].in_features
        tensors = check_stored(weights.folder, path, sizes, own, types)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, QuantizedLinear(layers[path], own, tensors))
        kept += [f"{path}.{tensor}" for tensor in tensors]
    return frozenset(kept)


def _chosen(
    model: nn.Module, weights: Weights, folder: QuantizedFolder
) -> tuple[dict[str, WeightFormat], dict[str, nn.Linear]]:
    """The layers of a model that the configuration of a folder has quantized, and their formats."""
    chosen: dict[str, WeightFormat] = {}
    layers: dict[str, nn.Linear] = {}
    for path, module in model.named_modules():
        stored = weights.named(f"{path}.weight")
        if stored is None or not isinstance(module, nn.Linear):
            continue
        classes = tuple(cls.__name__ for cls in type(module).__mro__)
        own = folder.choose(stored.removesuffix(".weight"), classes)
        if own is not None and not isinstance(module, QuantizedLinear):
            chosen[path], layers[path] = own, module
    return chosen, layers


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
