"""A signal's handler raises in the middle of what drives graphs: see interruptions_job.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.wheel, pytest.mark.timeout(150)]

JOB = Path(__file__).with_name("interruptions_job.py")


def test_graphs_work_on_after_interruptions() -> None:
    ended = run(3, [str(JOB)], seconds=100)
    assert ended.code == 0, ended.output
    assert ended.output.count("has ended") == 3, ended.output
