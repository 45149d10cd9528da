"""Every schedule gives the gradients of the plain loop on MPI ranks, too."""

from __future__ import annotations

import re

import pytest

from .jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(150)]


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [
        (4, (0, 1)),
        pytest.param(2, (9, 10), marks=pytest.mark.slow),
        pytest.param(4, (1, 9), marks=pytest.mark.slow),
        pytest.param(2, (10, 11), marks=pytest.mark.slow),
    ],
)
def test_random_pipelines(ranks: int, seeds: tuple[int, int]) -> None:
    """By default a few of the orders that `auto` finds; see the job."""
    every = [] if seeds == (0, 1) else ["every"]
    job = ["-m", "tests.mpi.pipeline_job", *map(str, seeds), *every]
    ended = run(ranks, job, seconds=120, warm=True)
    assert ended.code == 0, ended.output
    passed = [int(n) for n in re.findall(r"rank \d: (\d+) agree", ended.output)]
    # Orders that `auto` finds itself: without and with recomputing.
    found = (5 if every else 2) if ranks == 4 else 1
    assert passed == [5 + found + seeds[1] - seeds[0]] * ranks
