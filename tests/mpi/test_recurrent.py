"""Recurrent layers as a stage of a pipeline train as in a plain loop."""

from __future__ import annotations

import pytest

from .jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(150)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("fake", marks=pytest.mark.slow)])
def test_recurrent_layers_as_a_stage(device: str) -> None:
    variables = {"CG_DEVICE": device}
    ended = run(2, ["-m", "tests.mpi.recurrent_job"], seconds=120, variables=variables, warm=True)
    assert ended.code == 0, ended.output
    assert ended.output.count("recurrent layers agree") == 2
