"""A signal's handler raises in the middle of what drives graphs: see interruptions_job.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.wheel, pytest.mark.timeout(150)]

JOB = Path(__file__).with_name("interruptions_job.py")


@pytest.mark.parametrize("count", [100, pytest.param(400, marks=pytest.mark.slow)])
def test_graphs_work_on_after_interruptions(count: int) -> None:
    ended = run(3, [str(JOB), str(count)], seconds=140, warm=True)
    assert ended.code == 0, ended.output
    assert ended.output.count("has ended") == 3, ended.output
