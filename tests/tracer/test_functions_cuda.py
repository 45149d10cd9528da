"""Traced methods on a GPU: kernels are chosen, and random numbers drawn, as eager PyTorch does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .function_tools import check_equal, trace, trace_vjp
from .test_functions import Block, mlp

pytestmark = [pytest.mark.timeout(300), pytest.mark.gpu]


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_transformer_block(dropout: float, dtype: torch.dtype) -> None:
    block = Block(width=64, dropout=dropout).to("cuda", dtype)
    check_equal(block, "forward", rand(2, 16, 64, dtype=dtype), tolerance=1e-5)


def test_convolution_and_batch_norm() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    check_equal(net.cuda(), "forward", rand(2, 3, 9, 9), tolerance=1e-5)


def test_batch_norm_statistics() -> None:
    ours, theirs = nn.BatchNorm2d(3).cuda(), nn.BatchNorm2d(3).cuda()
    x = rand(2, 3, 4, 4).detach()
    body = trace(ours, "forward", x).body
    for _ in range(2):
        body(x)
        theirs(x)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    assert ours.num_batches_tracked == 2


def test_recurrent_network() -> None:
    # cuDNN's fused kernel, which eager PyTorch runs, computes in TF32.
    check_equal(nn.LSTM(4, 6).cuda(), "forward", rand(5, 3, 4), tolerance=2e-3)


def test_gradients_live_on_the_device() -> None:
    net = mlp().cuda()
    x = rand(5, 8)
    vjp = trace_vjp(net, "forward", (0,), (0,), x)
    result = vjp.first.only_body(x.detach())
    (grad,) = vjp.second.only_body(*result[1:], torch.ones(5, 8, device="cuda"))
    assert grad.is_cuda
    assert all(p.grad is not None and p.grad.is_cuda for p in net.parameters())


class NearKeys(nn.Module):
    """Attention that prefers near keys, by a trained slope for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slopes, length = self.slopes, x.shape[2]
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, length, length, device=x.device
        )
        result = flex_attention(
            *(x, x, x, lambda s, b, h, i, j: s + (j - i) * slopes[h]), block_mask=mask
        )
        assert isinstance(result, torch.Tensor)
        return result


def test_functions_of_scores() -> None:
    check_equal(NearKeys().cuda(), "forward", rand(2, 4, 256, 16), tolerance=1e-4)
