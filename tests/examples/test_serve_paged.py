"""Attention to a paged cache by kernels, in Triton's interpreter, against a gather of blocks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

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
    assert done.stdout.count("equal") == len(CASES)


@pytest.mark.gpu
def test_kernels_on_a_gpu_attend_as_a_gather_does() -> None:
    compare("cuda")


def compare(device: str) -> None:
    """Attend by kernels on a device, and by a gather on the host."""
    from transformers.masking_utils import causal_mask_function

    from examples.serve.attention import PagedCache, Pages, attend
    from examples.serve.paged import attend as by_kernels

    generator = torch.Generator().manual_seed(0)
    size, blocks = 16, 40
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
        entries_of = {0: pool.flatten(0, 1).flatten(2)}
        cache = PagedCache(Pages(entries_of, size, positions, entries.flatten(), tables))
        mask = cache.mask(causal_mask_function, torch.float32)
        right = attend(query, *cache.update(key, value, 0), mask, 0.3, cache)
        grouped = query.view(rows, groups, shared * tokens, width)
        there = [each.to(device) for each in (grouped, pool, tables.flatten(), positions.flatten())]
        # A batch has positions as a column among others.
        there[-1] = torch.stack([there[-1], 9 * there[-1]], 1)[:, 0]
        mine = by_kernels(*there, 0.3).cpu().view(rows, -1, tokens, width).transpose(1, 2)
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
        print("equal")


if __name__ == "__main__":
    compare("cpu")  # in the interpreter, which is chosen when the kernels are defined
