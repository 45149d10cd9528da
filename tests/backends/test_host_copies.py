"""Copies of tensors to the host's memory and back: values and strides stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cg.backends.program.value_copies import HostCopyPort, is_dense


def back(tensor: Tensor) -> Tensor:
    """A tensor that has been on the host."""
    out, home = HostCopyPort(is_to_host=True), HostCopyPort(is_to_host=False)
    out.start(tensor)
    home.start(out.take())
    copy = home.take()
    assert isinstance(copy, Tensor)
    return copy


BASE = torch.arange(120.0).view(4, 5, 6)


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (BASE, True),
        (BASE.transpose(0, 2), True),
        (BASE.permute(1, 2, 0)[:, :1], False),
        (BASE[:, ::2], False),
        (BASE[..., 0], False),
        (BASE[1], True),
        (torch.tensor(3.0), True),
        (torch.ones(0, 3), True),
        (torch.ones(1, 7, 1).to(torch.bfloat16), True),
        (torch.tensor([True, False]), True),
        (torch.ones(3, dtype=torch.complex64).conj(), True),
    ],
)
def test_values_and_strides_stay(tensor: Tensor, dense: bool) -> None:
    assert is_dense(tuple(tensor.shape), tensor.stride()) == dense
    copy = back(tensor)
    assert copy.dtype is tensor.dtype
    assert copy.stride() == tensor.stride()
    assert torch.equal(copy, tensor)
    if tensor.numel():
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
