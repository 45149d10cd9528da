"""A linear layer whose weight stays quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from ...tracer.method.quantized.dequantize import dequantized, rounded
from ...tracer.method.quantized.weight_format import WeightFormat
from ...tracer.values.plan import Parts, Sharding, cut
from ..conversions.conversion import StoredType
from .few_rows import product_of_few


class QuantizedLinear(nn.Linear):
    """A linear layer that has a quantized weight, and multiplies by the numbers it stands for.

    The tensors have the names, shapes and types that their folder has. They get no gradients. The
    weight is dequantized for each product, in the forward and in the backward, and never kept. If
    the format quantizes inputs, the gradient of an input is that of its rounded value.

    Args:
        old: the layer that it stands for; its bias stays.
        weight_format: of its tensors.
        types: of them, by name. They are made on the meta device.

    Attributes:
        rounds_inputs: whether inputs are quantized as the format says.
    """

    def __init__(
        self, old: nn.Linear, weight_format: WeightFormat, types: Mapping[str, StoredType]
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = old.in_features, old.out_features
        self.stored_format, self.dtype = weight_format, old.weight.dtype
        self.rounds_inputs = weight_format.activations is not None
        self.register_parameter("weight", None)
        for name, kind in types.items():
            empty = torch.empty(kind.shape, dtype=kind.dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.register_parameter("bias", old.bias)

    def extra_repr(self) -> str:
        inputs = self.stored_format.activations
        more = f", {inputs}" if inputs is not None else ""
        return f"{super().extra_repr()}, {self.stored_format.name}{more}"

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors, by name."""
        own: dict[str, Any] = self._parameters  # or what stands in for parameters
        return {name: own[name] for name in self.stored_format.names}

    def forward(self, x: Tensor) -> Tensor:
        own: dict[str, Any] = self._parameters
        return self.product(x, own)

    def product(self, x: Tensor, tensors: Mapping[str, Any]) -> Tensor:
        """The outputs of the layer, with tensors in the place of its own.

        Args:
            x: [..., inputs].
            tensors: by name, as the layer has them; the bias is None if there is none.
        """
        # What autocast would cast a product's operands to, it casts this product's input to.
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        stored = [tensors[name] for name in self.stored_format.names]
        output: Tensor = _Product.apply(x, self, *stored)  # type: ignore[no-untyped-call]
        bias = tensors["bias"]
        return output if bias is None else output + bias.to(output.dtype)

    def plain(self) -> nn.Linear:
        """A layer of the same sizes with a plain weight, without memory."""
        has_bias = self.bias is not None
        return nn.Linear(
            self.in_features, self.out_features, has_bias, device="meta", dtype=self.dtype
        )

    def joined(self, others: Sequence[QuantizedLinear], ways: int = 1) -> QuantizedLinear | None:
        """One layer with the outputs of this one, and behind them those of others.

        Args:
            others: layers of as many inputs; all have a bias, or none.
            ways: into how many pieces ranks cut the outputs. A piece has one of each layer, one
                behind the other.

        Returns:
            None if formats differ, or tensors of all outputs do, such as the scale of inputs; or if
            the outputs of a piece are no whole runs that share a scale or a word.
        """

        def cat(several: Sequence[Tensor], along: int) -> Tensor:
            pieces = [torch.unflatten(tensor, along, (ways, -1)) for tensor in several]
            return torch.cat(pieces, along + 1).flatten(along, along + 1)

        layers, own = (self, *others), self.stored_format
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        run, _ = own.units(shapes)
        if any(each.stored_format != own or each.out_features % (run * ways) for each in layers):
            return None
        tensors: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            several, along = [each.tensors[name] for each in layers], own.dims(name, shape).outputs
            is_of_run = name in (own.scale, own.zero) and own.outputs_per_scale > 0
            if along is not None:
                tensors[name] = cat([each.data for each in several], along)
            elif is_of_run:  # the outputs of this layer are one, and those of all are several
                return None
            elif name in own.kept or all(torch.equal(several[0], each) for each in several):
                tensors[name] = several[0].data
            else:
                return None
        plain = self.plain()
        plain.out_features = sum(each.out_features for each in layers)
        types = {name: StoredType(tuple(each.shape), each.dtype) for name, each in tensors.items()}
        layer = QuantizedLinear(plain, own, types)
        if self.bias is not None:
            tensors["bias"] = cat([each.bias.data for each in layers], 0)
        for name, tensor in tensors.items():
            layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        return layer

    def shardings(self, weight: Sharding) -> dict[str, Sharding]:
        """How ranks share the tensors, by name, where they share a plain weight.

        Args:
            weight: of a weight [outputs, inputs].

        Returns:
            Shardings that leave whole what belongs together: scales, and packed words.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        units = self.stored_format.units(shapes)
        sizes = self.out_features, self.in_features
        shared: dict[str, Sharding] = {}
        for name, shape in shapes.items():
            dims = self.stored_format.dims(name, shape)
            sharding = Sharding((), weight.parts)
            for dimension, cuts in weight.cuts:
                along = dimension % 2  # of a matrix, -2 is 0
                own = (dims.outputs, dims.inputs)[along]
                if own is not None:
                    parts = self._parts(cuts.axes, along, units[along], sizes[along] // cuts.blocks)
                    sharding &= cut(own, *cuts.axes, blocks=cuts.blocks)
                    sharding = Sharding(sharding.cuts, (*sharding.parts, parts))
            shared[name] = sharding
        return shared

    def _parts(self, axes: tuple[str, ...], along: int, unit: int, size: int) -> Parts:
        """The runs that a cut of outputs (0) or inputs (1) must leave whole."""
        kind = ("outputs", "inputs")[along]
        return Parts(
            axes,
            1 if size % unit else size // unit,
            f"runs of {unit} {kind} that share a scale or a word ({self.stored_format.name})",
            "use an axis whose size divides this number, or a folder with weights that are not "
            "quantized",
        )

    def _weight(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        sizes = self.out_features, self.in_features
        return dequantized(self.stored_format, tensors, *sizes).to(dtype)


class _Product(torch.autograd.Function):
    """The product of an input and a weight that is dequantized for it, and again for the backward.

    Args:
        x: [..., inputs].
        layer: that says how.
        tensors: of the layer.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear, *tensors: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(*tensors)
        named = dict(zip(layer.stored_format.names, tensors, strict=True))
        activations = layer.stored_format.activations
        if activations is not None and layer.rounds_inputs:
            x = rounded(activations, x, named.get(activations.scale))
        product = product_of_few(layer.stored_format, named, x, layer.out_features)
        return F.linear(x, layer._weight(named, x.dtype)) if product is None else product

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        layer: QuantizedLinear = ctx.layer
        named = dict(zip(layer.stored_format.names, ctx.saved_tensors, strict=True))
        to_input = gradient.matmul(layer._weight(named, gradient.dtype))
        return (to_input, None, *(None for _ in named))
