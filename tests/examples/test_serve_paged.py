"""Attention to a paged cache by kernels, in Triton's interpreter, against a gather of blocks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

CASES = ((1, 1, 1, 16), (3, 2, 7, 16), (2, 2, 16, 8), (4, 1, 20, 24))
"""Rows, KV heads, heads that share one, and their width."""


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
    for rows, groups, shared, width in CASES:
        pool = torch.randn(1 + rows * blocks, size, groups, 2, width, generator=generator)
        order = torch.randperm(rows * blocks, generator=generator) + 1
        tables = order.view(rows, blocks)
        positions = torch.tensor([0, 255, 256, 600][:rows])
        entries = tables.gather(1, positions[:, None] // size)[:, 0] * size + positions % size
        query = torch.randn(rows, groups * shared, 1, width, generator=generator)
        key, value = torch.randn(2, rows, groups, 1, width, generator=generator)
        entries_of = {0: pool.flatten(0, 1).flatten(2)}
        cache = PagedCache(Pages(entries_of, size, positions[:, None], entries, tables))
        mask = cache.mask(causal_mask_function, torch.float32)
        right = attend(query, *cache.update(key, value, 0), mask, 0.3, cache)
        grouped = query.view(rows, groups, shared, width)
        there = [each.to(device) for each in (grouped, pool, tables.flatten(), positions)]
        # A batch has positions as a column among others.
        there[-1] = torch.stack([there[-1], 9 * there[-1]], 1)[:, 0]
        mine = by_kernels(*there, 0.3).cpu()
        torch.testing.assert_close(mine.reshape(right.shape), right, rtol=1e-4, atol=1e-5)
        print("equal")


if __name__ == "__main__":
    compare("cpu")  # in the interpreter, which is chosen when the kernels are defined
