"""NCCL by CuPy's bindings."""

from __future__ import annotations

from typing import Any

from cupy.cuda import nccl

from .library import Nccl


class Calls:
    """CuPy's methods of communicators as functions, with arguments in NCCL's order."""

    def __init__(self) -> None:
        self.get_version = nccl.get_version
        self.group_start = nccl.groupStart
        self.group_end = nccl.groupEnd

    def send(self, at: int, count: int, type_: int, peer: int, comm: Any, stream: int) -> None:
        comm.send(at, count, type_, peer, stream)

    def recv(self, at: int, count: int, type_: int, peer: int, comm: Any, stream: int) -> None:
        comm.recv(at, count, type_, peer, stream)

    def all_reduce(self, *arguments: Any) -> None:
        *before, comm, stream = arguments
        comm.allReduce(*before, stream)

    def reduce_scatter(self, *arguments: Any) -> None:
        *before, comm, stream = arguments
        comm.reduceScatter(*before, stream)

    def all_gather(self, *arguments: Any) -> None:
        *before, comm, stream = arguments
        comm.allGather(*before, stream)

    def broadcast(self, *arguments: Any) -> None:
        *before, comm, stream = arguments
        comm.broadcast(*before, stream)

    def comm_abort(self, comm: Any) -> None:
        comm.abort()

    def comm_destroy(self, comm: Any) -> None:
        comm.destroy()


class CupyNccl(Nccl):
    """NCCL by CuPy. Joining a communicator, and calling it, blocks the host.

    CuPy cannot set the width of one communicator; `NCCL_MAX_CTAS` sets that of all.
    """

    name = "NCCL (CuPy)"

    def __init__(self) -> None:
        if not nccl.available:
            raise ImportError("CuPy is built without NCCL")
        super().__init__(Calls(), nccl.NcclError, nonblocking=False)

    def unique_id(self) -> bytes:
        """Make the key that the members of a new communicator share; one of them calls this."""
        return bytes(c % 256 for c in self._new_key())

    def connect(self, size: int, unique: bytes, rank: int, width: int | None = None) -> Any:
        """Join a new communicator; all its members do."""
        key: Any = unique
        if not isinstance(self._new_key(), bytes):  # before version 14 it is of signed characters
            key = tuple(c - 256 if c > 127 else c for c in unique)
        description = f"joining of {size} ranks, as member {rank},"
        return self._checked(description, nccl.NcclCommunicator, size, key, rank)

    def is_ready(self, comm: Any) -> bool:
        """True: a communicator has been joined when `connect` returns."""
        self._checked("look for errors", comm.check_async_error)
        return True

    def _new_key(self) -> Any:
        return self._checked("making of a key", nccl.get_unique_id)


def make(nonblocking: bool) -> CupyNccl:
    """The library.

    Raises:
        ImportError: CuPy has no NCCL, or communicators are to be joined without blocking.
    """
    if nonblocking:
        raise ImportError("CuPy joins communicators with the host blocked only; use nccl4py")
    return CupyNccl()
