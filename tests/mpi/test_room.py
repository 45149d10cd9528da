"""Communicators of closed steps make room for those of others, in a real job."""

from __future__ import annotations

import pytest

from .jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(150)]


def test_closed_steps_make_room_on_fake_devices() -> None:
    job = ["-m", "tests.mpi.device_job", "tests.mpi.room_job"]
    ended = run(2, job, seconds=100, warm=True)
    assert ended.code == 0, ended.output
    assert ended.output.count("there was room") == 2, ended.output
