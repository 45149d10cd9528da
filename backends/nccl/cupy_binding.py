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
    """NCCL by CuPy. Joining a communicator, and calling it, blocks the host.

    CuPy cannot set the width of one communicator; `NCCL_MAX_CTAS` sets that of all.
    """

    name = "NCCL (CuPy)"

    def __init__(self) -> None:
        if not nccl.available:
            raise ImportError(_MISSING)
        _checked("version", nccl.get_version)

    def version(self) -> str:
        """The version of the library itself."""
        number = int(_checked("version", nccl.get_version))
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def unique_id(self) -> bytes:
        """Make the key that the members of a new communicator share; one of them calls this."""
        made = _checked("making of a key", nccl.get_unique_id)
        return made if isinstance(made, bytes) else bytes(c % 256 for c in made)

    def connect(self, size: int, unique: bytes, rank: int, width: int | None = None) -> Any:
        """Begin to join a new communicator; all its members do."""
        what = f"joining of {size} ranks, as member {rank},"
        return _checked(what, nccl.NcclCommunicator, size, self._as_made(unique), rank)

    def _as_made(self, unique: bytes) -> Any:
        """A key as CuPy has it: bytes, or signed characters before version 14."""
        if isinstance(_checked("making of a key", nccl.get_unique_id), bytes):
            return unique
        return tuple(c - 256 if c > 127 else c for c in unique)

    def is_ready(self, comm: Any) -> bool:
        """True once a communicator has been joined."""
        error = self.error(comm)
        if error is not None:
            raise CommunicationError(error)
        return True

    def send(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: int) -> None:
        """Send bytes to member `peer`."""
        try:
            comm.send(pointer, nbytes, BYTES, peer, stream)
        except nccl.NcclError as error:
            raise failed(f"send of {nbytes} bytes to member {peer}", error) from error

    def recv(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: int) -> None:
        """Receive bytes from member `peer`."""
        try:
            comm.recv(pointer, nbytes, BYTES, peer, stream)
        except nccl.NcclError as error:
            raise failed(f"receive of {nbytes} bytes from member {peer}", error) from error

    def all_reduce(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: int
    ) -> None:
        """Reduce `count` elements; each member gets the result."""
        try:
            comm.allReduce(source, target, count, type_, op, stream)
        except nccl.NcclError as error:
            raise failed(f"all-reduce of {count} elements of type {type_}", error) from error

    def reduce_scatter(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: int
    ) -> None:
        """Reduce; each member gets its part, of `count` elements."""
        try:
            comm.reduceScatter(source, target, count, type_, op, stream)
        except nccl.NcclError as error:
            raise failed(f"reduce-scatter of {count} elements of type {type_}", error) from error

    def all_gather(self, source: int, target: int, nbytes: int, comm: Any, stream: int) -> None:
        """Give each member the `nbytes` bytes of all, in their order."""
        try:
            comm.allGather(source, target, nbytes, BYTES, stream)
        except nccl.NcclError as error:
            raise failed(f"all-gather of {nbytes} bytes", error) from error

    def broadcast(
        self, source: int, target: int, nbytes: int, root: int, comm: Any, stream: int
    ) -> None:
        """Give each member the bytes of member `root`."""
        try:
            comm.broadcast(source, target, nbytes, BYTES, root, stream)
        except nccl.NcclError as error:
            raise failed(f"broadcast of {nbytes} bytes from member {root}", error) from error

    def exchange(
        self, messages: Sequence[tuple[int, int, int, int]], comm: Any, stream: int
    ) -> None:
        """Send to and receive from several members at once."""
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
        """The failure of a communicator, in words; None if there is none."""
        try:
            comm.check_async_error()
        except nccl.NcclError as error:
            return str(error)
        return None

    def abort(self, comm: Any) -> None:
        """Break off the operations under way, and give the communicator up."""
        _checked("breaking off", comm.abort)

    def destroy(self, comm: Any) -> None:
        """Give up a communicator without operations under way."""
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
