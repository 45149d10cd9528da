"""NCCL by nccl4py's low-level bindings, NVIDIA's own."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic, sleep
from typing import Any

import nccl.bindings.nccl as low

from ..streams.library import CommunicationError
from .codes import BYTES, IN_PROGRESS, SUCCESS
from .failures import failed

CALL_SECONDS = 60.0
"""How long a call that does not block may take to put its work on the stream. The first ones
between two members also connect them."""

YIELDS = 100
"""So often a call is asked for with no more than a yield between."""

NAP = 50e-6
"""Seconds between two polls after that."""


class Nccl4py:
    """NCCL by nccl4py.

    Args:
        nonblocking: True to join communicators, and make all their calls, without blocking the
            host. Such a communicator can be aborted at any time. But NCCL starts a thread for each
            call, and this class waits for it, since the next call may only be made when the last is
            done. The wait asks the host's side of NCCL alone, and so is allowed in a capture.
    """

    name = "NCCL (nccl4py)"

    def __init__(self, nonblocking: bool) -> None:
        self._nonblocking = nonblocking
        _checked("version", low.get_version)  # loads the library, or says that there is none

    def version(self) -> str:
        """The version of the library itself."""
        number = int(_checked("version", low.get_version))
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def unique_id(self) -> bytes:
        """Make the key that the members of a new communicator share; one of them calls this."""
        return bytes(_checked("making of a key", low.get_unique_id))

    def connect(self, size: int, unique: bytes, rank: int, width: int | None = None) -> Any:
        """Begin to join a new communicator; all its members do."""
        config = low.Config()
        config.blocking = int(not self._nonblocking)
        if width is not None:
            config.min_ctas, config.max_ctas = 1, width
        key = low.UniqueId.from_buffer(unique)
        what = f"joining of {size} ranks, as member {rank},"
        return _checked(what, low.comm_init_rank_config, size, key, rank, config)

    def is_ready(self, comm: Any) -> bool:
        """True once a communicator has been joined."""
        state = int(_checked("look for errors", low.comm_get_async_error, comm))
        if state not in (SUCCESS, IN_PROGRESS):
            raise CommunicationError(_described(state, comm))
        return state == SUCCESS

    def send(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: int) -> None:
        """Send bytes to member `peer`."""
        try:
            low.send(pointer, nbytes, BYTES, peer, comm, stream)
        except low.NCCLError as error:
            raise failed(f"send of {nbytes} bytes to member {peer}", error) from error
        self._finish(comm)

    def recv(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: int) -> None:
        """Receive bytes from member `peer`."""
        try:
            low.recv(pointer, nbytes, BYTES, peer, comm, stream)
        except low.NCCLError as error:
            raise failed(f"receive of {nbytes} bytes from member {peer}", error) from error
        self._finish(comm)

    def all_reduce(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: int
    ) -> None:
        """Reduce `count` elements; each member gets the result."""
        try:
            low.all_reduce(source, target, count, type_, op, comm, stream)
        except low.NCCLError as error:
            raise failed(f"all-reduce of {count} elements of type {type_}", error) from error
        self._finish(comm)

    def reduce_scatter(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: int
    ) -> None:
        """Reduce; each member gets its part, of `count` elements."""
        try:
            low.reduce_scatter(source, target, count, type_, op, comm, stream)
        except low.NCCLError as error:
            raise failed(f"reduce-scatter of {count} elements of type {type_}", error) from error
        self._finish(comm)

    def all_gather(self, source: int, target: int, nbytes: int, comm: Any, stream: int) -> None:
        """Give each member the `nbytes` bytes of all, in their order."""
        try:
            low.all_gather(source, target, nbytes, BYTES, comm, stream)
        except low.NCCLError as error:
            raise failed(f"all-gather of {nbytes} bytes", error) from error
        self._finish(comm)

    def broadcast(
        self, source: int, target: int, nbytes: int, root: int, comm: Any, stream: int
    ) -> None:
        """Give each member the bytes of member `root`."""
        try:
            low.broadcast(source, target, nbytes, BYTES, root, comm, stream)
        except low.NCCLError as error:
            raise failed(f"broadcast of {nbytes} bytes from member {root}", error) from error
        self._finish(comm)

    def exchange(
        self, messages: Sequence[tuple[int, int, int, int]], comm: Any, stream: int
    ) -> None:
        """Send to and receive from several members at once."""
        try:
            low.group_start()
            try:
                for peer, source, target, nbytes in messages:
                    low.send(source, nbytes, BYTES, peer, comm, stream)
                    low.recv(target, nbytes, BYTES, peer, comm, stream)
            finally:
                low.group_end()
        except low.NCCLError as error:
            # The end of a group fails, too, if one of its calls has: that one says why.
            within = error.__context__
            first = within if isinstance(within, low.NCCLError) else error
            raise failed(f"exchange with {len(messages)} members", first) from error
        self._finish(comm)

    def error(self, comm: Any) -> str | None:
        """The failure of a communicator, in words; None if there is none."""
        try:
            state = int(low.comm_get_async_error(comm))
        except low.NCCLError as error:  # of a watchdog's thread, which goes by what is returned
            return str(failed("look for errors", error))
        if state in (SUCCESS, IN_PROGRESS):
            return None
        return _described(state, comm)

    def abort(self, comm: Any) -> None:
        """Break off the operations under way, and give the communicator up."""
        _checked("breaking off", low.comm_abort, comm)

    def destroy(self, comm: Any) -> None:
        """Give up a communicator without operations under way."""
        _checked("giving up of a communicator", low.comm_destroy, comm)

    def _finish(self, comm: Any) -> None:
        """Wait until the last call has put its work on the stream, if it may return before."""
        if not self._nonblocking:
            return
        deadline, looks = monotonic() + CALL_SECONDS, 0
        while not self.is_ready(comm):
            if monotonic() > deadline:
                raise CommunicationError(
                    f"a call of {self.name} has not put its work on the device within "
                    f"{CALL_SECONDS:g} s: another member of the communicator may not have made it. "
                    "Look at the other ranks' output, and at that of NCCL with NCCL_DEBUG=INFO"
                )
            looks += 1
            sleep(NAP if looks > YIELDS else 0)


def _described(state: int, comm: Any) -> str:
    """An error, in NCCL's words."""
    return f"{low.get_error_string(state)} {low.get_last_error(comm)}".strip()


def _checked(what: str, call: Any, *arguments: Any) -> Any:
    """A call that is not one of many in a step; those do without another one around them."""
    try:
        return call(*arguments)
    except low.NCCLError as error:
        raise failed(what, error) from error


def make(nonblocking: bool) -> Nccl4py:
    """The library."""
    return Nccl4py(nonblocking)
