"""Bells: rings wake, deaths are noticed, and what cannot be helped does no harm."""

from __future__ import annotations

import errno
import os
import select
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cg.backends.cpu.waiting.doorbell import Doorbell

FOREVER = 1000.0  # the tests hang, and fail by their timeout, where nothing ends a wait


RANK = 7

AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
FLOOD = 'if printf rings > "$0"; then echo rang; else echo refused; fi'


@pytest.fixture(params=["nameless", "named"])
def bell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Doorbell]:
    doorbell = Doorbell(tmp_path if request.param == "named" else None)
    yield doorbell
    doorbell.close()
    doorbell.close()


@pytest.fixture
def other(bell: Doorbell) -> Iterator[Doorbell]:
    """A bell that can ring the first one."""
    doorbell = Doorbell()
    doorbell.connect(RANK, bell.address)
    yield doorbell
    doorbell.close()


def test_a_ring_ends_a_wait_even_if_it_came_before(bell: Doorbell, other: Doorbell) -> None:
    for _ in range(3):
        other.ring(RANK)
        bell.wait(FOREVER)


def test_many_rings_and_rings_of_the_gone_do_no_harm(bell: Doorbell, other: Doorbell) -> None:
    for _ in range(100_000):
        other.ring(RANK)
    bell.wait(FOREVER)
    assert not select.select([bell], [], [], 0)[0]
    bell.close()
    for _ in range(100_000):
        other.ring(RANK)


def test_a_bell_that_is_not_there_or_another_one_is_not_rung(bell: Doorbell) -> None:
    caller = Doorbell()
    caller.connect(RANK, replace(bell.address, inode=bell.address.inode + 1))
    caller.connect(RANK, replace(bell.address, path="/nowhere"))
    caller.ring(RANK)
    assert not select.select([bell], [], [], 0)[0]
    caller.close()


def test_a_sealed_bell_has_no_name_and_rings(
    bell: Doorbell, other: Doorbell, tmp_path: Path
) -> None:
    bell.seal()
    assert list(tmp_path.iterdir()) == []
    other.ring(RANK)
    bell.wait(FOREVER)


def test_a_bell_has_no_name_that_other_users_could_send_to(bell: Doorbell) -> None:
    """A name in the abstract name space of sockets has neither owner nor permissions."""
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = {f"socket:[{fields[6]}]": fields[7] for fields in sockets if len(fields) > 7}
    ours = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    assert not any(name.startswith("@cg-") for link, name in names.items() if link in ours)
    status = Path(bell.address.path).stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o600, os.getuid())


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can be another user"
)
def test_another_user_cannot_ring(bell: Doorbell) -> None:
    flood = [*AS_NOBODY, "sh", "-c", FLOOD, bell.address.path]
    done = subprocess.run(flood, capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"
    assert not select.select([bell], [], [], 0)[0]


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
