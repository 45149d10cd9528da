"""Random transfers between layouts have the same outcome on ranks in processes of their own."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings

from ..passes.random_transfers import Types, is_valid, summands, transfers
from ..sampling import scaled
from .jobs import counts_of_agreement, needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(150)]

RANKS = 4
EXAMPLES = 80
"""Of a profile that draws what tests name."""


def test_random_transfers(tmp_path: Path) -> None:
    found: list[Types] = []

    @settings(max_examples=scaled(EXAMPLES), derandomize=True, database=None)
    @given(types=transfers(world=RANKS))
    def collect(types: Types) -> None:
        # A rank cannot tell by its own summand whether it is the right one.
        if is_valid(types) and not summands(types[1]):
            found.append(types)

    collect()
    assert len(found) >= scaled(EXAMPLES) // 3  # the others are not valid, or summands
    file = tmp_path / "transfers.pickle"
    file.write_bytes(pickle.dumps(found))
    program = ["-m", "tests.mpi.transfers_job", str(file)]
    ended = run(RANKS, program, seconds=120, warm=True)
    assert ended.code == 0, ended.output
    assert counts_of_agreement(ended.output) == [len(found)] * RANKS
