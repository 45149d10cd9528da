"""Linear layers of a served model on CPUs: the same values, by the faster of torch's two libraries.

torch's own choice (MKL) reads weights slower than oneDNN, from two rows on, and oneDNN is fastest
where weights lie as its kernels walk through them. Such a weight is opaque: it has no strides. A
call of oneDNN costs 20 µs more than one of MKL, so small weights stay with MKL, which is fastest
where they lie transposed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS = 8
"""Rows of the products that weights are laid out for; products of other sizes work as well."""

SMALL = 2**18
"""Elements of the smallest weight that oneDNN takes, by measurement of 8 rows on AVX2."""

# An operator of its own: TorchInductor calls it as it is, and tracing sees a weight with strides.
_LIBRARY = torch.library.Library("cg_serve", "DEF")
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    packed: Tensor = weight.packed  # type: ignore[attr-defined]
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


def _shape_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_LIBRARY.impl("linear", _by_onednn, "CPU")
_LIBRARY.impl("linear", _shape_of, "Meta")


class Projection(nn.Module):
    """`nn.Linear` for inference.

    Its weight is a stand-in, which is a single NaN in memory. The packed weight is an attribute of
    the stand-in, so code that gets the one has the other.
    """

    def __init__(self, old: nn.Linear) -> None:
        super().__init__()
        stand_in = torch.full((1, 1), torch.nan).expand(old.weight.shape)
        self.weight = nn.Parameter(stand_in, requires_grad=False)
        self.weight.packed = torch.ops.mkldnn._reorder_linear_weight(old.weight, ROWS)  # type: ignore[attr-defined]
        self.bias = old.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.cg_serve.linear(x, self.weight, self.bias)
