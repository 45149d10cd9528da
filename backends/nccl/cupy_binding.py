"""NCCL by CuPy's bindings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupy.cuda import nccl

from ..streams.library import CommunicationError
from .codes import BYTES

_MISSING = "CuPy is built without NCCL"


class CupyNccl:
    """See `Library`. Communicators are joined, and called, with the host blocked.

    CuPy cannot tell NCCL how wide one is to be; `NCCL_MAX_CTAS` does so for all.
    """

    name = "NCCL (CuPy)"

    def __init__(self) -> None:
        if not nccl.available:
            raise ImportError(_MISSING)
        nccl.get_version()

    def version(self) -> str:
        """See `Library`."""
        number = int(nccl.get_version())
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def unique_id(self) -> bytes:
        """See `Library`."""
        made = nccl.get_unique_id()
        return made if isinstance(made, bytes) else bytes(c % 256 for c in made)

    def connect(self, size: int, unique: bytes, rank: int, width: int | None = None) -> Any:
        """See `Library`."""
        try:
            return nccl.NcclCommunicator(size, self._as_made(unique), rank)
        except nccl.NcclError as error:
            raise CommunicationError(str(error)) from error

    def _as_made(self, unique: bytes) -> Any:
        """A key as CuPy has it: bytes, or signed characters before version 14."""
        if isinstance(nccl.get_unique_id(), bytes):
            return unique
        return tuple(c - 256 if c > 127 else c for c in unique)

    def is_ready(self, comm: Any) -> bool:
        """See `Library`."""
        error = self.error(comm)
        if error is not None:
            raise CommunicationError(error)
        return True

    def send(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: int) -> None:
        """See `Library`."""
        comm.send(pointer, nbytes, BYTES, peer, stream)

    def recv(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: int) -> None:
        """See `Library`."""
        comm.recv(pointer, nbytes, BYTES, peer, stream)

    def all_reduce(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: int
    ) -> None:
        """See `Library`."""
        comm.allReduce(source, target, count, type_, op, stream)

    def reduce_scatter(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: int
    ) -> None:
        """See `Library`."""
        comm.reduceScatter(source, target, count, type_, op, stream)

    def all_gather(self, source: int, target: int, nbytes: int, comm: Any, stream: int) -> None:
        """See `Library`."""
        comm.allGather(source, target, nbytes, BYTES, stream)

    def broadcast(
        self, source: int, target: int, nbytes: int, root: int, comm: Any, stream: int
    ) -> None:
        """See `Library`."""
        comm.broadcast(source, target, nbytes, BYTES, root, stream)

    def exchange(
        self, messages: Sequence[tuple[int, int, int, int]], comm: Any, stream: int
    ) -> None:
        """See `Library`."""
        nccl.groupStart()
        try:
            for peer, source, target, nbytes in messages:
                comm.send(source, nbytes, BYTES, peer, stream)
                comm.recv(target, nbytes, BYTES, peer, stream)
        finally:
            nccl.groupEnd()

    def error(self, comm: Any) -> str | None:
        """See `Library`."""
        try:
            comm.check_async_error()
        except nccl.NcclError as error:
            return str(error)
        return None

    def abort(self, comm: Any) -> None:
        """See `Library`."""
        comm.abort()

    def destroy(self, comm: Any) -> None:
        """See `Library`."""
        comm.destroy()


def make(nonblocking: bool) -> CupyNccl:
    """The library.

    Raises:
        ImportError: CuPy has no NCCL, or communicators are to be joined without blocking.
    """
    if nonblocking:
        raise ImportError("CuPy joins communicators with the host blocked only; use nccl4py")
    return CupyNccl()
