"""Ranks that share a sequence drop what one process drops."""

from __future__ import annotations

import pytest

from .jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(600)]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_drop_what_one_process_drops(ranks: int) -> None:
    ended = run(ranks, ["-m", "tests.mpi.dropout_job"], seconds=300, warm=True)
    assert ended.code == 0, ended.output
    assert ended.output.count("agrees") == ranks, ended.output
