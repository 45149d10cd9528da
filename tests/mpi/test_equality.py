"""Compiled training equals a plain PyTorch loop, on MPI ranks; see tests/equality.py."""

from __future__ import annotations

import pytest

from .jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(200)]


@pytest.mark.parametrize(
    ("ranks", "comparisons"),
    [(1, 4), (2, 13), *(pytest.param(ranks, 4, marks=pytest.mark.slow) for ranks in (4, 8))],
)
def test_losses_and_gradients_are_those_of_a_plain_loop(ranks: int, comparisons: int) -> None:
    """On four ranks, a default run has the pipelines of test_pipelines.py."""
    every = ["every"] if ranks == 2 else []
    ended = run(ranks, ["-m", "tests.equality", *every], seconds=180, warm=True)
    assert ended.code == 0, ended.output
    for rank in range(ranks):
        assert ended.output.count(f"rank {rank}: ") == comparisons
