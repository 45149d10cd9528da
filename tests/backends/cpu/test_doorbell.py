"""Bells: rings wake, deaths are noticed, and what cannot be helped does no harm."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cg.backends.cpu.doorbell import Doorbell

FOREVER = 1000.0  # the tests hang, and fail by their timeout, where nothing ends a wait


@pytest.fixture
def bell() -> Iterator[Doorbell]:
    doorbell = Doorbell()
    yield doorbell
    doorbell.close()


def test_a_ring_ends_a_wait_even_if_it_came_before(bell: Doorbell) -> None:
    other = Doorbell()
    for _ in range(3):
        other.ring(bell.address)
        bell.wait(FOREVER)
    other.close()


def test_many_rings_and_rings_of_the_gone_do_no_harm(bell: Doorbell) -> None:
    other = Doorbell()
    for _ in range(1000):
        bell.ring(other.address)
    other.wait(FOREVER)
    other.close()
    bell.ring(other.address)


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_a_death_is_noticed(
    bell: Doorbell, has_pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "not on this kernel")

    if not has_pidfd:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    bell.watch(3, process.pid)
    bell.watch(4, os.getpid())
    bell.wait(0.01)
    assert bell.dead == set()
    process.kill()
    process.wait()
    bell.wait(FOREVER if has_pidfd else 0.01)
    assert bell.dead == {3}


def test_who_is_dead_already_is_noticed_at_once(bell: Doorbell) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    bell.watch(5, process.pid)
    assert bell.dead == {5}
