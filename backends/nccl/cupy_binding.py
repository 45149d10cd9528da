"""NCCL by CuPy's bindings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupy.cuda import nccl

from ..streams.library import CommunicationError
from .codes import BYTES
from .failures import failed

_MISSING = "CuPy is built without NCCL"


class CupyNccl:
    """See `Library`. Communicators are joined, and called, with the host blocked.

    CuPy cannot tell NCCL how wide one is to be; `NCCL_MAX_CTAS` does so for all.
    """

    name = "NCCL (CuPy)"

    def __init__(self) -> None:
        if not nccl.available:
            raise ImportError(_MISSING)
        _checked("version", nccl.get_version)

    def version(self) -> str:
        """See `Library`."""
        number = int(_checked("version", nccl.get_version))
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def unique_id(self) -> bytes:
        """See `Library`."""
        made = _checked("making of a key", nccl.get_unique_id)
        return made if isinstance(made, bytes) else bytes(c % 256 for c in made)

    def connect(self, size: int, unique: bytes, rank: int, width: int | None = None) -> Any:
        """See `Library`."""
        what = f"joining of {size} ranks, as member {rank},"
        return _checked(what, nccl.NcclCommunicator, size, self._as_made(unique), rank)

    def _as_made(self, unique: bytes) -> Any:
        """A key as CuPy has it: bytes, or signed characters before version 14."""
        if isinstance(_checked("making of a key", nccl.get_unique_id), bytes):
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
        try:
            comm.send(pointer, nbytes, BYTES, peer, stream)
        except nccl.NcclError as error:
            raise failed(f"send of {nbytes} bytes to member {peer}", error) from error

    def recv(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: int) -> None:
        """See `Library`."""
        try:
            comm.recv(pointer, nbytes, BYTES, peer, stream)
        except nccl.NcclError as error:
            raise failed(f"receive of {nbytes} bytes from member {peer}", error) from error

    def all_reduce(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: int
    ) -> None:
        """See `Library`."""
        try:
            comm.allReduce(source, target, count, type_, op, stream)
        except nccl.NcclError as error:
            raise failed(f"all-reduce of {count} elements of type {type_}", error) from error

    def reduce_scatter(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: int
    ) -> None:
        """See `Library`."""
        try:
            comm.reduceScatter(source, target, count, type_, op, stream)
        except nccl.NcclError as error:
            raise failed(f"reduce-scatter of {count} elements of type {type_}", error) from error

    def all_gather(self, source: int, target: int, nbytes: int, comm: Any, stream: int) -> None:
        """See `Library`."""
        try:
            comm.allGather(source, target, nbytes, BYTES, stream)
        except nccl.NcclError as error:
            raise failed(f"all-gather of {nbytes} bytes", error) from error

    def broadcast(
        self, source: int, target: int, nbytes: int, root: int, comm: Any, stream: int
    ) -> None:
        """See `Library`."""
        try:
            comm.broadcast(source, target, nbytes, BYTES, root, stream)
        except nccl.NcclError as error:
            raise failed(f"broadcast of {nbytes} bytes from member {root}", error) from error

    def exchange(
        self, messages: Sequence[tuple[int, int, int, int]], comm: Any, stream: int
    ) -> None:
        """See `Library`."""
        try:
            nccl.groupStart()
            try:
                for peer, source, target, nbytes in messages:
                    comm.send(source, nbytes, BYTES, peer, stream)
                    comm.recv(target, nbytes, BYTES, peer, stream)
            finally:
                nccl.groupEnd()
        except nccl.NcclError as error:
            # The end of a group fails, too, if one of its calls has: that one says why.
            within = error.__context__
            first = within if isinstance(within, nccl.NcclError) else error
            raise failed(f"exchange with {len(messages)} members", first) from error

    def error(self, comm: Any) -> str | None:
        """See `Library`."""
        try:
            comm.check_async_error()
        except nccl.NcclError as error:
            return str(error)
        return None

    def abort(self, comm: Any) -> None:
        """See `Library`."""
        _checked("breaking off", comm.abort)

    def destroy(self, comm: Any) -> None:
        """See `Library`."""
        _checked("giving up of a communicator", comm.destroy)


def _checked(what: str, call: Any, *arguments: Any) -> Any:
    """A call that is not one of many in a step; those do without another one around them."""
    try:
        return call(*arguments)
    except nccl.NcclError as error:
        raise failed(what, error) from error


def make(nonblocking: bool) -> CupyNccl:
    """The library.

    Raises:
        ImportError: CuPy has no NCCL, or communicators are to be joined without blocking.
    """
    if nonblocking:
        raise ImportError("CuPy joins communicators with the host blocked only; use nccl4py")
    return CupyNccl()
