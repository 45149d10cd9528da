"""Random steps mean on MPI ranks what their Python means."""

from __future__ import annotations

import pytest

from .jobs import counts_of_agreement, needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(150)]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [
        (4, (2, 5)),
        pytest.param(4, (0, 5), marks=SLOW),
        pytest.param(2, (12, 15), marks=SLOW),
        pytest.param(4, (5, 12), marks=SLOW),
        pytest.param(2, (15, 20), marks=SLOW),
    ],
)
def test_random_steps(ranks: int, seeds: tuple[int, int]) -> None:
    ended = run(ranks, ["-m", "tests.mpi.oracle_job", *map(str, seeds)], seconds=120, warm=True)
    assert ended.code == 0, ended.output
    passed = counts_of_agreement(ended.output)
    # Some of the steps cannot be pipelined, and are refused, by all ranks alike.
    assert len(passed) == ranks
    assert len(set(passed)) == 1
    assert passed[0] >= 0.8 * (seeds[1] - seeds[0])
