"""Recurrent layers as a stage of a pipeline train as in a plain loop."""

from __future__ import annotations

import pytest

from .jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(150)]


def test_recurrent_layers_as_a_stage() -> None:
    ended = run(2, ["-m", "tests.mpi.recurrent_job"], seconds=120, warm=True)
    assert ended.code == 0, ended.output
    assert ended.output.count("recurrent layers agree") == 2
