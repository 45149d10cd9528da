"""Padded rows of `nn.TransformerEncoder` in inference are those of plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from .function_tools import trace

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

X = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
LEFT = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)
HOLES = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)


class Encoder(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        last = nn.LayerNorm(8) if norm else None
        self.encoder = nn.TransformerEncoder(layer, 2, norm=last)
        if last is not None:
            nn.init.ones_(last.bias)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("padding", [LEFT, HOLES], ids=["left", "holes"])
@pytest.mark.parametrize("grad", [False, True])
def test_padded_rows(norm: bool, padding: torch.Tensor, grad: bool) -> None:
    actor = Encoder(norm).eval()
    before: Any = nn.TransformerEncoder.forward
    with torch.set_grad_enabled(grad):
        traced = trace(actor, "forward", X, padding)
        expected = actor(X, padding).detach()
    torch.testing.assert_close(traced.body(X, padding)[0], expected)
    assert traced.guard is None or traced.guard() is None
    assert nn.TransformerEncoder.forward is before
