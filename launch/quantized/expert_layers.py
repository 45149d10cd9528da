"""Have a model keep the weights of experts quantized that its folder has quantized.

A folder has the layers of each expert, and a model has weights that stack them. Which layers are in
which weight, and in which order, is what the model's library would do with plain layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...tracer.method.quantized.dequantize import FLOATS
from ...tracer.method.quantized.weight_format import WeightFormat
from ..checkpoints.weights import Weights
from ..conversions.composition import Composition, StoredAxis
from ..conversions.conversion import StoredType
from ..conversions.own_names import STACKED
from ..models.experts import StackedExperts, choose_experts
from .quantized_experts import QuantizedExperts
from .readers import READABLE, QuantizedFolder
from .stored_layers import check_stored, in_detail

_LAYER = re.compile(r"^(.*\.experts)\.(\d+)\.(\w+)$")
"""The path of a layer of one of several experts."""
_TENSOR = re.compile(r"^(.*\.experts\.\d+\.\w+)\.")
"""The name of a tensor of such a layer."""


@dataclass(frozen=True)
class _Weight:
    """A stacked weight of a module of experts that is quantized.

    Attributes:
        module: of experts.
        name: of its parameter.
        weight_format: of all layers.
        outputs: of each layer, by name, in the order of the weight's outputs.
        inputs: of all.
    """

    module: nn.Module
    name: str
    weight_format: WeightFormat
    outputs: Mapping[str, int]
    inputs: int


def keep_experts(model: nn.Module, weights: Weights, folder: QuantizedFolder) -> list[str]:
    """Have a model keep stacked weights of experts quantized.

    Args:
        model: of transformers, on the meta device.
        weights: of the folder.
        folder: its quantized layers, by its configuration.

    Returns:
        The paths of the tensors of these weights.

    Raises:
        ValueError: there are quantized experts that the model does not stack, or stacks in a way
            that is not known, or tensors do not fit.
    """
    mixtures = {path: m for path, m in model.named_modules() if isinstance(m, StackedExperts)}
    stored = _stored_layers(model, weights, folder)
    if not mixtures and not stored:
        return []
    plain = {
        f"{path}.weight": StoredType(own.sizes(_levels(weights, path, own)), torch.float32)
        for path, own in stored.items()
    }
    compositions = weights.conversion(model, weights.shapes(model), plain).compositions
    chosen: dict[str, _Weight] = {}
    taken: set[str] = set()
    for path, module in mixtures.items():
        assert isinstance(module, nn.Module)
        for name, parameter in module.named_parameters(recurse=False):
            own = weights.named(f"{path}.{name}")
            if parameter.dim() != 3 or own is None:
                continue
            weight_format = folder.choose(own, ())
            if own in compositions:
                taken |= set(compositions[own].names)
                chosen[f"{path}.{name}"] = _by_expert(
                    weights, module, name, compositions[own], stored
                )
            elif weight_format is not None:
                chosen[f"{path}.{name}"] = _stacked(module, name, weight_format)
    left = plain.keys() - taken
    if left:
        raise ValueError(
            f"the weights in {weights.folder} are quantized, with those of experts, such as "
            f"'{min(left)}', and {type(model).__name__} has no stacked weights that they are for. "
            f"{READABLE}"
        )
    kept = _keep(model, weights, chosen)
    if kept:
        choose_experts(model, None)
    return kept


def _keep(model: nn.Module, weights: Weights, chosen: Mapping[str, _Weight]) -> list[str]:
    """Put modules in the place of the weights that the folder has quantized; gives tensors."""
    names = [
        f"{path}.{layer}.{name}"
        for path, weight in chosen.items()
        for layer in weight.outputs
        for name in weight.weight_format.names
    ]
    types = weights.types(model, names) if names else {}
    kept: list[str] = []
    ordered: dict[str, WeightFormat] = {}
    for path, weight in chosen.items():
        own, first = weight.weight_format, next(iter(weight.outputs))
        if f"{path}.{first}.{own.scale}" not in types:
            continue  # it is plain
        if own.index and not own.by_index and f"{path}.{first}.{own.index}" not in types:
            own = replace(own, index="")
        parameter = weight.module.get_parameter(weight.name)
        tensors = {
            layer: check_stored(
                *(weights.folder, f"{path}.{layer}", (width, weight.inputs)),
                *(own, types, parameter.shape[0]),
            )
            for layer, width in weight.outputs.items()
        }
        if own.index and not own.by_index:
            ordered |= {f"{path}.{layer}": own for layer in tensors}
        delattr(weight.module, weight.name)
        experts = QuantizedExperts(own, weight.outputs, weight.inputs, tensors, parameter.dtype)
        weight.module.add_module(weight.name, experts)
        kept += [f"{path}.{layer}.{name}" for layer in tensors for name in tensors[layer]]
    in_detail(model, ordered, weights)  # groups are of neighbours
    return kept


def _stored_layers(
    model: nn.Module, weights: Weights, folder: QuantizedFolder
) -> dict[str, WeightFormat]:
    """The quantized layers of experts in a folder that are no layers of the model itself.

    Raises:
        ValueError: tensors of experts are of no layer that is read.
    """
    known = {path for path, _ in model.named_modules()}
    layers: dict[str, WeightFormat] = {}
    for name, file in weights.files.items():
        expert = _TENSOR.match(name)
        if expert is None or expert[1] in layers or expert[1] in known:
            continue
        path = expert[1]
        own = folder.choose(path, ("Linear",))
        needed = own and {f"{path}.{own.weight}", f"{path}.{own.scale}"}
        if own and needed and needed <= weights.files.keys() and not own.description:
            layers[path] = own
        elif file.dtypes[name] not in FLOATS:
            raise ValueError(
                f"the weights in {weights.folder} are quantized, with those of experts, such as "
                f"'{name}': experts of {folder.method} are not read so. {READABLE}"
            )
    return layers


def _levels(weights: Weights, path: str, own: WeightFormat) -> tuple[int, ...]:
    name = f"{path}.{own.weight}"
    return weights.files[name].shapes[name]


def _by_expert(
    weights: Weights,
    module: StackedExperts,
    name: str,
    composition: Composition,
    stored: Mapping[str, WeightFormat],
) -> _Weight:
    """A weight that consists of layers of single experts.

    Raises:
        ValueError: layers do not lie one behind the other, or experts differ.
    """
    outputs = 2 if module.is_transposed else 1
    layers: dict[int, list[tuple[int, str, int]]] = {n: [] for n in range(composition.shape[0])}
    formats, straight = set(), True
    for block in composition.blocks:
        path = block.name.removesuffix(".weight")
        expert = _LAYER.match(path)
        assert expert is not None, "it is a layer of an expert"
        begin, end = block.box[outputs]
        straight &= block.box[0] == (int(expert[2]), int(expert[2]) + 1)
        straight &= block.axes[outputs] == StoredAxis(0, 1) and not any(block.start)
        layers[block.box[0][0]].append((begin, expert[3], end - begin))
        formats.add(stored[path])
    several = {tuple(sorted(parts)) for parts in layers.values()}
    if not straight or len(several) > 1 or len(formats) > 1 or len(layers) != module.num_experts:
        raise ValueError(
            f"the experts in {weights.folder} are quantized, and '{block.name}' and others are "
            f"stacked in a way that is not read: all of the {module.num_experts} experts have "
            f"one format, and layers one behind the other. {READABLE}"
        )
    widths = {layer: width for _, layer, width in several.pop()}
    assert isinstance(module, nn.Module)
    return _Weight(module, name, formats.pop(), widths, composition.shape[3 - outputs])


def _stacked(module: StackedExperts, name: str, weight_format: WeightFormat) -> _Weight:
    """A weight whose tensors a folder has stacked, if it is quantized."""
    assert isinstance(module, nn.Module)
    shape = module.get_parameter(name).shape
    outputs, inputs = (shape[2], shape[1]) if module.is_transposed else (shape[1], shape[2])
    return _Weight(module, name, weight_format, {STACKED: outputs}, inputs)
