"""Wakes a sleeping process of the same machine, and notices when one of them has died."""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket

Address = bytes

_HARMLESS = (errno.EAGAIN, errno.ECONNREFUSED, errno.ENOBUFS)


class Doorbell:
    """This process's bell: a datagram socket in the abstract name space, gone with the process.

    A ring may come late or for nothing; whoever sleeps looks again at what it waits for.
    """

    def __init__(self) -> None:
        self.address: Address = b"\0cg-" + secrets.token_hex(8).encode()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(self.address)
        self._poll = select.epoll()
        self._poll.register(self._socket, select.EPOLLIN)
        self._watched: dict[int, int] = {}
        self._unwatchable: dict[int, int] = {}
        self.dead: set[int] = set()

    def ring(self, address: Address) -> None:
        """Wake the process whose bell has `address`, if it still lives."""
        try:
            self._socket.sendto(b"\0", address)
        except OSError as error:
            # Its queue is full, so it will wake; or it has gone, which `dead` will tell; or the
            # kernel is short of memory, and it wakes by itself before long.
            if error.errno not in _HARMLESS:
                raise

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
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched.clear()
        self._unwatchable.clear()
        self._poll.close()
        self._socket.close()

    def _bury(self, descriptor: int) -> None:
        self.dead.add(self._watched[descriptor])  # first, if a signal's handler raises meanwhile
        self._poll.unregister(descriptor)
        del self._watched[descriptor]
        os.close(descriptor)

    def _drain(self) -> None:
        try:
            while True:
                self._socket.recv(1)
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
