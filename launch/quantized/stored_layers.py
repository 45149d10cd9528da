"""Tensors of quantized layers in a folder, compared with the layers and their formats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ...tracer.method.quantized.dequantize import takes
from ...tracer.method.quantized.weight_format import WeightFormat
from ..checkpoints.weights import Weights
from ..conversions.conversion import StoredType
from .readers import described


def in_detail(
    model: nn.Module, formats: Mapping[str, WeightFormat], weights: Weights
) -> dict[str, WeightFormat]:
    """The formats of layers, with what small tensors of each layer say.

    Args:
        model: that has the layers.
        formats: of each, by path.
        weights: that have the tensors.

    Raises:
        ValueError: groups are no neighbours, though the configuration says so; or a description is
            of another format.
    """
    wanted = {path: _small(own) for path, own in formats.items()}
    names = [f"{path}.{name}" for path, name in wanted.items() if name]
    try:
        small = weights.read(model, names) if names else {}
    except KeyError as error:
        raise _lacks(weights.folder, str(error.args[0]), "it") from error
    detailed = {}
    for path, own in formats.items():
        detailed[path] = own
        if own.description:
            text = bytes(small[f"{path}.{own.description}"].flatten().tolist())
            detailed[path] = described(own, text, f"'{path}' in {weights.folder}")
        elif wanted[path]:
            _check_groups(weights, path, own, small[f"{path}.{own.index}"])
    return detailed


def _small(own: WeightFormat) -> str:
    """The tensor of a layer that has to be read to know its format; empty: none has."""
    return own.description or ("" if own.by_index else own.index)


def _check_groups(weights: Weights, path: str, own: WeightFormat, groups: Tensor) -> None:
    """Compare the stored group of each input with that of its neighbours.

    Args:
        groups: `[inputs]`, or `[experts, inputs]`.

    Raises:
        ValueError: groups are no neighbours, though the configuration says so.
    """
    size = own.inputs_per_scale or groups.shape[-1]
    right = torch.arange(groups.shape[-1]) // size
    if not torch.equal(groups.long(), right.expand_as(groups)):
        raise ValueError(
            f"'{path}.{own.index}' in {weights.folder} has groups of inputs that are no "
            "neighbours, and its config.json says that they are: set desc_act to true there"
        )


def check_stored(
    folder: Path,
    path: str,
    sizes: tuple[int, int],
    own: WeightFormat,
    types: Mapping[str, StoredType],
    experts: int | None = None,
) -> dict[str, StoredType]:
    """Compare what is stored of a layer with its sizes.

    Args:
        folder: that has it.
        path: of the layer.
        sizes: its outputs and inputs.
        own: its format.
        types: of stored tensors, by path.
        experts: how many layers are stacked; None: the tensors are those of one.

    Returns:
        The types of the layer's tensors, by name, with the shapes that they have here.

    Raises:
        ValueError: something is missing, or of another size.
    """
    if own.has_own_shapes and sizes[1] % own.inputs_per_scale:
        raise ValueError(
            f"'{path}' in {folder} has {sizes[1]} inputs, and scales of {own.inputs_per_scale} "
            f"numbers, which go on from row to row: {own.name} is read where this number divides "
            "that one. Give a folder of the same model in another format"
        )
    front = () if experts is None else (experts,)
    tensors: dict[str, StoredType] = {}
    for name in own.names:
        if f"{path}.{name}" not in types:
            raise _lacks(folder, f"{path}.{name}", own.name)
        stored = types[f"{path}.{name}"]
        wanted = own.shape(name, *sizes)
        shape = stored.shape
        if wanted is not None and own.has_own_shapes:
            first = (*front, *wanted[0])
            shape = first if math.prod(first) == math.prod(shape) else shape
        if wanted is not None and shape not in [(*front, *size) for size in wanted]:
            raise ValueError(
                f"'{path}.{name}' is {list(stored.shape)} in {folder}, and {own.name} "
                f"of {sizes[1]} inputs and {sizes[0]} outputs has "
                f"{' or '.join(str([*front, *size]) for size in wanted)}"
            )
        if not takes(own, name, stored.dtype):
            raise ValueError(
                f"'{path}.{name}' is {stored.dtype} in {folder}, which {own.name} has not"
            )
        tensors[name] = StoredType(shape, stored.dtype)
    return tensors


def _lacks(folder: Path, name: str, owner: str) -> ValueError:
    return ValueError(
        f"{folder} lacks '{name}', which {owner} has: save the model with the library of its format"
    )
