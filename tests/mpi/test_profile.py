"""Profiles of several processes: see profile_job.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from .jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(120)]


def test_all_ranks_are_in_one_trace(tmp_path: Path) -> None:
    ended = run(2, ["-m", "tests.mpi.profile_job", str(tmp_path)], seconds=100, warm=True)
    assert ended.code == 0, ended.output
    assert ended.output.count("profiled") == 2
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"trace.json", "manifest.json", "step.html", "talk.svg"}
