"""Attention to a paged cache by operators, against a gather of blocks.

Kernels of Triton run in its interpreter.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

CASES = (
    *((1, 1, 1, 16, 1), (3, 2, 7, 16, 1), (2, 2, 16, 8, 1), (4, 1, 20, 24, 1)),
    *((4, 2, 1, 16, 4), (4, 1, 7, 24, 5)),
)
"""Rows, KV heads, heads that share one, their width, and tokens of each row."""


def test_kernels_attend_as_a_gather_does() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.examples.test_serve_paged"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 4 * len(CASES)


@pytest.mark.gpu
def test_kernels_on_a_gpu_attend_as_a_gather_does() -> None:
    compare("cuda")


@dataclass(frozen=True)
class Batch:
    """What the operators take on the host, and what a gather of blocks gives.

    Of pools in float8 there are exponents.
    """

    query: Tensor
    pool: Tensor
    exponents: Tensor | None
    tables: Tensor
    positions: Tensor
    mask: Tensor
    scale: float
    right: Tensor

    @property
    def operands(self) -> tuple[Tensor, ...]:
        return self.query, self.pool, *self.own_exponents, self.tables, self.positions

    @property
    def own_exponents(self) -> tuple[Tensor, ...]:
        return () if self.exponents is None else (self.exponents,)


def batches(sees: Callable[..., Tensor], is_float8: bool) -> Iterator[Batch]:
    """A batch of each case."""
    from examples.serve.attention import PagedCache, attend
    from examples.serve.float8_cache import quantize
    from examples.serve.pages import Pages

    generator = torch.Generator().manual_seed(0)
    size, blocks, scale = 16, 40, 0.3
    for rows, groups, shared, width, tokens in CASES:
        pool = torch.randn(1 + rows * blocks, size, groups, 2, width, generator=generator)
        order = torch.randperm(rows * blocks, generator=generator) + 1
        tables = order.view(rows, blocks)
        # Tokens of a row lie in several parts; a row of two ends with padding.
        positions = torch.tensor([0, 254, 256, 600])[:rows, None] + torch.arange(tokens)
        entries = tables.gather(1, positions // size) * size + positions % size
        positions[0, 2:], entries[0, 2:] = 0, 0
        query = torch.randn(rows, groups * shared, tokens, width, generator=generator)
        key, value = torch.randn(2, rows, groups, tokens, width, generator=generator)
        exponents = None
        if is_float8:
            pool, exponents = quantize(pool * torch.rand(groups, 2, 1, generator=generator))
        pages = Pages(
            *({0: pool.flatten(0, 1).flatten(2)}, size, positions, entries.flatten(), tables),
            exponents={} if exponents is None else {0: exponents.flatten(0, 1)},
        )
        cache = PagedCache(pages)
        mask = cache.mask(sees, torch.float32)
        right = attend(query, *cache.update(key, value, 0), mask, scale, None)
        grouped = query.view(rows, groups, shared * tokens, width)
        flat = tables.flatten(), positions.flatten()
        by_heads = right.transpose(1, 2).reshape(grouped.shape)
        yield Batch(grouped, pool, exponents, *flat, mask, scale, by_heads)


@pytest.mark.parametrize("is_float8", [False, True])
@pytest.mark.parametrize("window", [None, 20])
def test_hosts_attend_as_a_gather_does(window: int | None, is_float8: bool) -> None:
    """What is behind twice the length of a row is not read: in it there are no numbers."""
    from examples.serve.paged import operator

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = key <= query
        return near if window is None else near & (key > query - window)

    for batch in batches(sees, is_float8):
        rows, size = len(batch.query), batch.pool.shape[1]
        table = batch.tables.view(rows, -1)
        for blocks, last in zip(table, batch.positions.view(rows, -1).amax(1), strict=True):
            batch.pool[blocks[2 * (int(last) // size + 1) :]] = 127 if is_float8 else math.nan
        masks = () if window is None else (batch.mask,)
        attend = operator(is_float8, window is not None)
        out = attend(*batch.operands, *masks, batch.scale)
        torch.testing.assert_close(out, batch.right, rtol=1e-4, atol=1e-5)


def compare(device: str) -> None:
    """Attend by kernels on a device, and by a gather on the host."""
    from transformers.masking_utils import causal_mask_function

    from examples.serve import paged

    # With one program for a device, parts are long.
    for programs, is_float8 in ((1, False), (paged.PROGRAMS, False), (paged.PROGRAMS, True)):
        for batch in batches(causal_mask_function, is_float8):
            query, pool, *exponents, tables, positions = (op.to(device) for op in batch.operands)
            # A batch has positions as a column among others.
            positions = torch.stack([positions, 9 * positions], 1)[:, 0]
            with patch.object(paged, "PROGRAMS", programs):
                out = paged.attend(query, pool, tables, positions, batch.scale, *exponents).cpu()
            torch.testing.assert_close(out, batch.right, rtol=1e-4, atol=1e-5)
            print("equal")
    for batch in batches(causal_mask_function, False):
        with patch.object(paged, "PROGRAMS", 1):
            compare_parts(batch, device)
        print("equal")


def compare_parts(batch: Batch, device: str) -> None:
    """Attend to the first keys of rows, and to none where a token sees none of them."""
    from examples.serve.paged import attend_with_statistics
    from examples.serve.partial_attention import attend_parts

    last = batch.positions - 255  # of which the longest row has two parts
    last = torch.where(last < 0, -1, last)
    right, statistics = attend_parts(
        batch.query, batch.pool[None].flatten(-2), batch.tables, last[None], batch.scale
    )
    operands = (each.to(device) for each in (batch.query, batch.pool, batch.tables, last))
    out, sums = (each.cpu() for each in attend_with_statistics(*operands, batch.scale))
    shared = batch.query.shape[2] * len(batch.query) // len(last)
    sees = (last >= 0).view(len(batch.query), 1, 1, -1).expand(-1, sums.shape[1], shared, -1)
    sees = sees.reshape(sums.shape)
    assert not out[~sees].any()
    assert bool((sums[~sees] == -torch.inf).all())
    torch.testing.assert_close(out[sees], right[0][sees], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sums[sees], statistics[0][sees], rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    compare("cpu")  # in the interpreter, which is chosen when the kernels are defined
