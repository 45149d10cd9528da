"""The weights of a module of experts, which stay quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...tracer.method.quantized.quantized_expert_products import quantized_expert_linear
from ...tracer.method.quantized.weight_format import WeightFormat
from ..conversions.conversion import StoredType


class StackedLayer(nn.Module):
    """The stored tensors of one linear layer of all experts: `[experts, ...]` each.

    Args:
        types: of the tensors, by name. They are made on the meta device.
    """

    def __init__(self, types: Mapping[str, StoredType]) -> None:
        super().__init__()
        for name, kind in types.items():
            empty = torch.empty(kind.shape, dtype=kind.dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))


class QuantizedExperts(nn.Module):
    """Stands for a weight that stacks the matrices of experts, and multiplies by what it has.

    The matrix of an expert has the outputs of several linear layers, one behind the other, as
    folders store them. Their tensors keep their names, types and bytes; those of all experts are
    stacked. They get no gradients, and are dequantized for each product.

    Args:
        weight_format: of all layers.
        outputs: of each layer, by name.
        inputs: of all.
        types: of the tensors of each layer, by the name of the layer and their own.
        dtype: of the weight that it stands for.

    Attributes:
        rounds_inputs: whether inputs are quantized as the format says.
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        outputs: Mapping[str, int],
        inputs: int,
        types: Mapping[str, Mapping[str, StoredType]],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.stored_format, self.outputs, self.inputs = weight_format, dict(outputs), inputs
        self.dtype = dtype
        self.rounds_inputs = weight_format.activations is not None
        for name in outputs:
            self.add_module(name, StackedLayer(types[name]))

    def extra_repr(self) -> str:
        layers = ", ".join(f"{name}={size}" for name, size in self.outputs.items())
        return f"in_features={self.inputs}, {layers}, {self.stored_format.name}"

    def expert_product(self, rows: Tensor, ids: Tensor) -> Tensor:
        """The products of tokens with the matrices of their experts, as of `cg.expert_linear`."""
        tensors: list[Tensor] = []
        for layer in self.outputs:
            own: dict[str, Any] = self.get_submodule(layer)._parameters
            tensors += [own[name] for name in self.stored_format.names]
        sizes = tuple(self.outputs.values())
        return quantized_expert_linear(
            rows, tensors, ids, self.stored_format, sizes, self.inputs, self.rounds_inputs
        )

    def __getitem__(self, index: object) -> NoReturn:
        raise ValueError(
            f"the weights of these experts are quantized ({self.stored_format.name}), and an "
            "implementation of transformers asks for plain ones: leave out experts=, or give a "
            "folder of the same model with weights in bfloat16, float16 or float32"
        )
