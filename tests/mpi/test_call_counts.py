"""A steady execution makes few Python calls: what a compilation can find out is not found again."""

from __future__ import annotations

import re

from .jobs import needs_mpi, run

pytestmark = needs_mpi

MOST_CALLS = {"in a step": 45, "to start an execution": 24}
"""A few more than there are, which the version of Python changes."""


def test_calls_of_steady_executions() -> None:
    ended = run(2, ["-m", "tests.mpi.call_counts_job"], seconds=100, warm=True)
    assert ended.code == 0, ended.output
    counts = re.findall(r"rank (\d): (\d+) calls (.*)", ended.output)
    assert sorted((kind, rank) for rank, _, kind in counts) == [
        ("in a step", "0"),
        ("in a step", "1"),
        ("to start an execution", "0"),
    ]
    for rank, count, kind in counts:
        assert int(count) <= MOST_CALLS[kind], f"rank {rank}: {count} calls {kind}"
