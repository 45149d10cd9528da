"""Steps whose own Python does too much, on several ranks."""

from __future__ import annotations

from .jobs import needs_mpi, run

pytestmark = needs_mpi


def test_steps_refuse_alike_on_all_ranks() -> None:
    ended = run(2, ["-m", "tests.mpi.steps_job"], seconds=100, warm=True)
    assert ended.output.count("steps are eager Python, or say why not") == 2, ended.output
