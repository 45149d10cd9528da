"""Doorbells: wake sleeping processes of one machine, and notice when one has died."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import stat
from dataclasses import dataclass
from pathlib import Path

_RINGS = 1 << 16
"""At least as many bytes as a pipe holds."""

_MODE = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
"""For both ends of a pipe: a process that can read it may write while no other reads, without a
signal."""


@dataclass(frozen=True, slots=True)
class BellAddress:
    """The address of a bell, for other processes: a path, and the inode of the file there.

    A process in a PID namespace of its own, as containers have, finds another file at the path.
    """

    path: str
    inode: int


class Doorbell:
    """This process's bell: a pipe, which only processes of the same user can open.

    A ring may come late or for nothing, so a process that wakes looks again at what it waits for.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Make the bell.

        Args:
            folder: the folder in which the pipe gets a name, until `seal` takes it away. With None
                it gets no name, and others find it through /proc.
        """
        self._name: Path | None = None
        if folder is None:
            self._ends: tuple[int, ...] = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            path = f"/proc/{os.getpid()}/fd/{self._ends[0]}"
        else:
            self._name = folder / f"cg-bell-{secrets.token_hex(8)}"
            path = str(self._name)
            os.mkfifo(self._name, 0o600)
            self._ends = (os.open(self._name, _MODE),)
        self._pipe = self._ends[0]
        self.address = BellAddress(path, os.fstat(self._pipe).st_ino)
        self._poll = select.epoll()
        self._poll.register(self._pipe, select.EPOLLIN)
        self._others: dict[int, int] = {}
        self._watched: dict[int, int] = {}
        self._unwatchable: dict[int, int] = {}
        self.dead: set[int] = set()

    def connect(self, rank: int, address: BellAddress) -> None:
        """Make `ring` reach `rank`.

        Where it cannot, because the process has ended or cannot be seen from here, rings do
        nothing: a process that sleeps wakes by itself before long.
        """
        try:
            descriptor = os.open(address.path, _MODE)
        except OSError:
            return
        status = os.fstat(descriptor)
        if stat.S_ISFIFO(status.st_mode) and status.st_ino == address.inode:
            self._others[rank] = descriptor
        else:
            os.close(descriptor)

    def seal(self) -> None:
        """Take away the name, when all others have connected; idempotent."""
        if self._name is not None:
            self._name.unlink(missing_ok=True)

    def ring(self, rank: int) -> None:
        """Wake `rank`, if it still lives."""
        descriptor = self._others.get(rank)
        if descriptor is not None:
            with contextlib.suppress(BlockingIOError):  # the pipe is full, so it will wake
                os.write(descriptor, b"\0")

    def watch(self, rank: int, pid: int) -> None:
        """Put `rank` into `dead` once process `pid` has ended."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self.dead.add(rank)
        except OSError:  # an old kernel, or a sandbox: ask by signal 0 at every wait instead
            self._unwatchable[rank] = pid
        else:
            self._watched[descriptor] = rank
            self._poll.register(descriptor, select.EPOLLIN)

    def fileno(self) -> int:
        """A descriptor that is readable when `wait` would return at once."""
        return self._poll.fileno()

    def wait(self, seconds: float) -> None:
        """Sleep until somebody rings, a watched process ends, or the time is up."""
        for descriptor, _ in self._poll.poll(seconds):
            if descriptor in self._watched:
                self._bury(descriptor)
            else:
                self._drain()
        for rank, pid in tuple(self._unwatchable.items()):
            if not _is_alive(pid):
                self.dead.add(rank)
                del self._unwatchable[rank]

    def close(self) -> None:
        """Give back the descriptors; idempotent."""
        if self._poll.closed:
            return
        self.seal()
        for descriptor in (*self._watched, *self._others.values(), *self._ends):
            os.close(descriptor)
        self._watched.clear()
        self._others.clear()
        self._unwatchable.clear()
        self._poll.close()

    def _bury(self, descriptor: int) -> None:
        self.dead.add(self._watched[descriptor])  # first, in case a signal's handler raises
        self._poll.unregister(descriptor)
        del self._watched[descriptor]
        os.close(descriptor)

    def _drain(self) -> None:
        try:
            os.read(self._pipe, _RINGS)
        except BlockingIOError:
            return


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
