"""A program that does not wait for the norm of its gradients gives the same bits on MPI ranks."""

from __future__ import annotations

import re

import pytest

from .jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(250)]


def test_what_is_not_awaited_gives_the_same_bits() -> None:
    ended = run(3, ["-m", "tests.mpi.clipping_job"], seconds=80, warm=True)
    assert ended.code == 0, ended.output
    assert re.findall(r"undone (\d)", ended.output) == ["1"] * 3
