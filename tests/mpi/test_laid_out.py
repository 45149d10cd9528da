"""Transfers between layouts with uneven pieces, in processes."""

from __future__ import annotations

import re

import pytest

from .jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(200)]


def test_uneven_pieces_come_to_where_they_are_needed() -> None:
    ended = run(3, ["-m", "tests.mpi.laid_out_job"], seconds=150, warm=True)
    assert ended.code == 0, ended.output
    assert len(re.findall(r"rank \d: held as it should be", ended.output)) == 3, ended.output
