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
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def project(module: nn.Module) -> None:
    """Replace the linear layers of a module, if it pays, and lay their weights out."""
    looked_up = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, _projection(child, id(child.weight) in looked_up))


def _projection(old: nn.Linear, is_tied: bool) -> nn.Linear:
    new = Projection(old.in_features, old.out_features, old.bias is not None, device="meta")
    new.weight = old.weight if is_tied else _laid_out(old.weight)
    new.bias = old.bias
    return new


def _laid_out(weight: nn.Parameter) -> nn.Parameter:
    """The weight of a linear layer, [out, in], with its columns in a row."""
    return nn.Parameter(weight.t().contiguous().t(), requires_grad=False)
