"""Actors that share state, in processes: in order on one rank, and refused on several."""

from __future__ import annotations

import re

import pytest

from .jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(200)]


def test_what_actors_share_is_kept_in_order_or_refused() -> None:
    ended = run(2, ["-m", "tests.mpi.sharing_job"], seconds=180, warm=True)
    assert ended.code == 0, ended.output
    assert len(re.findall(r"rank \d: shared as it should be", ended.output)) == 2
