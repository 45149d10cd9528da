"""Buffers of pinned memory are cut out of pieces that torch's allocator does not round up."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cg.backends.devices.pinned_pieces import SMALL, PinnedPieces
from cg.backends.fake.device import FakeDevice
from tests.sampling import examples


class PinningDevice(FakeDevice):
    """Notes the pieces that are asked for, and touches none of their memory.

    Attributes:
        pieces: the bytes of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[int] = []

    def host_buffer(self, like: Tensor) -> Tensor:
        self.pieces.append(like.nbytes)
        return super().host_buffer(like)


def taken(sizes: list[int]) -> tuple[list[Tensor], list[int]]:
    """Buffers of some sizes, and the pieces that torch has been asked for."""
    device = PinningDevice()
    pieces = PinnedPieces(device)
    buffers = [pieces.take(size) for size in sizes]
    return buffers, [size for size in device.pieces if size]


@examples(60)
@given(sizes=st.lists(st.integers(0, 6 * SMALL), max_size=20))
def test_buffers_are_apart_and_pieces_are_powers_of_two(sizes: list[int]) -> None:
    buffers, pieces = taken(sizes)
    assert [buffer.numel() for buffer in buffers] == sizes
    assert all(buffer.dtype is torch.uint8 for buffer in buffers)
    spans = sorted((b.data_ptr(), b.data_ptr() + b.numel()) for b in buffers if b.numel())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    large = [piece for piece in pieces if piece >= SMALL]
    assert all(piece & (piece - 1) == 0 for piece in large)


@pytest.mark.parametrize("size", [288 << 10, 1300 << 10, 72 << 20])
def test_many_equal_buffers_lose_little(size: int) -> None:
    count = 64
    _, pieces = taken([size] * count)
    rounded = [1 << (piece - 1).bit_length() for piece in pieces]
    assert sum(rounded) <= (1.2 if size >= SMALL else 2) * size * count


def test_a_first_buffer_takes_no_more_than_torch_would() -> None:
    size = 5 * SMALL
    assert taken([size])[1] == [8 * SMALL]
