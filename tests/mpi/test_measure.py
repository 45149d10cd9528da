"""The cost of a step is measured on all ranks together, and they agree."""

from __future__ import annotations

import pytest

from .jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(250)]


def test_ranks_agree_on_what_they_measure() -> None:
    ended = run(2, ["-m", "tests.mpi.measure_job"], seconds=60, warm=True)
    assert ended.code == 0, ended.output
    assert ended.output.count(": measured") == 2
