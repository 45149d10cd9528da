"""Calls that are refused count as executions in no world: see counting_job.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from .jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(150)]

JOB = "tests.mpi.counting_job"


@pytest.mark.parametrize(
    ("ranks", "program"),
    [(0, [JOB]), (2, [JOB]), (2, ["tests.mpi.device_job", JOB])],
    ids=["virtual", "hosts", "devices"],
)
def test_a_refused_call_does_not_count(ranks: int, program: list[str], tmp_path: Path) -> None:
    variables = {} if ranks else {"CG_RANKS": "2"}
    command = ["-m", *program, str(tmp_path)]
    ended = run(ranks, command, variables=variables, seconds=100, warm=True)
    assert ended.code == 0, ended.output
    assert ended.output.count("count alike") == max(ranks, 1)
