"""Starts of a job with one cache: the second has the traces of the first, unless they are torn."""

from __future__ import annotations

import os
from pathlib import Path

from ..mpi import jobs
from ..mpi.jobs import needs_mpi

pytestmark = needs_mpi

JOB = str(Path(__file__).with_name("training_job.py"))


def start(cache: str) -> list[str]:
    """The losses, and lines of what the cache says."""
    variables = {"CG_CACHE": cache}
    ended = jobs.run(2, [JOB], seconds=120, variables=variables, warm=True)
    assert ended.code == 0, ended.output
    return ended.output.splitlines()


def test_a_second_start_computes_the_same_by_the_traces_of_the_first(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    without = start("")
    assert len(without) == 1
    first = start(str(cache))
    assert [file.name for file in cache.glob("*/.*")] == [], "no file is left half written"
    files = sorted(cache.glob("traces/*.entry"))
    assert files
    second = start(str(cache))
    assert first[:1] == second[:1] == without
    assert sum("has the trace of an earlier start" in line for line in first) == 0
    for rank in range(2):
        taken = f"rank {rank}: compile cache: Stage.forward has the trace of an earlier start"
        assert second.count(taken) == 2, "the forward alone, and with its backward"
    for file in files:
        os.truncate(file, file.stat().st_size // 2)
    again = start(str(cache))
    assert again[:1] == without
    assert sum("has the trace of an earlier start" in line for line in again) == 0
