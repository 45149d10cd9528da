"""Rows of experts that ranks exchange, in processes: on one machine, and as if on several."""

from __future__ import annotations

import re

import pytest

from .jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(200)]


@pytest.mark.parametrize("nodes", ["0000", "0101"])
def test_training_is_exactly_that_of_one_process(nodes: str) -> None:
    ended = run(4, ["-m", "tests.mpi.rows_job", nodes], seconds=150, warm=True)
    assert ended.code == 0, ended.output
    assert len(re.findall(r"rank \d: exactly as in one process", ended.output)) == 4, ended.output
