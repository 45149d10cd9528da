"""The micro-benchmarks work: each case runs once, and nothing is measured."""

from __future__ import annotations

from .jobs import needs_mpi, run

pytestmark = needs_mpi


def test_each_case_runs() -> None:
    program = ["-m", "pytest", "benchmarks", "--benchmark-disable", "-q", "-p", "no:cacheprovider"]
    ended = run(0, program, seconds=240, warm=True)
    assert ended.code == 0, ended.output
    assert "skipped" not in ended.output, ended.output
