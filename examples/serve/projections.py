"""Linear layers of a served model on CPUs: the same values, by the faster of torch's two libraries.

For a handful of rows torch's own choice (MKL) reads weights slower than oneDNN. Weights lie with
their columns in a row, which both read faster.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEAST = 4
"""Rows from which on oneDNN is faster; it spends some 15 microseconds on each call."""

# An operator of its own, for TorchInductor calls such as it is and expects packed weights of
# oneDNN's. It costs a microsecond more than oneDNN's.
_LIBRARY = torch.library.Library("cg_serve", "DEF")
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _shape_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_LIBRARY.impl("linear", _by_onednn, "CPU")
_LIBRARY.impl("linear", _shape_of, "Meta")


class Projection(nn.Linear):
    """`nn.Linear` for inference."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if x.device.type != "cpu" or x.dtype is not torch.float32 or rows < LEAST:
            return super().forward(x)
        return torch.ops.cg_serve.linear(x, self.weight, self.bias)


def project(module: nn.Module) -> None:
    """Replace the linear layers of a module, whose weights are of the meta device, if it pays."""
    if not torch.backends.mkldnn.is_available():
        return
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            has_bias = child.bias is not None
            new = Projection(child.in_features, child.out_features, has_bias, device="meta")
            new.weight, new.bias = child.weight, child.bias
            setattr(module, name, new)
        else:
            project(child)


def lay_out(weight: Tensor) -> Tensor:
    """The weight of a linear layer, [out, in], with its columns in a row."""
    return weight.t().contiguous().t()
