"""NCCL behind the protocol that the ports of streams use, by nccl4py's low-level bindings."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from time import monotonic, sleep
from typing import Any

from ..errors import TransportError
from ..streams.library import CommunicationError, RawMessage, batch_in_words
from .codes import BYTES, IN_PROGRESS, SUCCESS

CALL_SECONDS = 60.0
"""Seconds that a call that does not block may take to put its work on the stream. The first ones
between two members also connect them."""

YIELDS = 100
"""The polls of a call that have no more than a yield between them."""

NAP = 50e-6
"""Seconds between two polls after that."""


class Nccl:
    """NCCL.

    Args:
        low: the module `nccl.bindings.nccl`: NCCL's functions, with arguments in the order of
            `nccl.h`.
        nonblocking: True to join communicators, and make all their calls, without blocking the
            host. Such a communicator can be aborted at any time. But NCCL starts a thread for each
            call, and this class waits for it, since the next call may only be made when the last is
            done. The wait asks the host's side of NCCL alone, and so is allowed in a capture.
    """

    name = "NCCL (nccl4py)"

    def __init__(self, low: Any, nonblocking: bool) -> None:
        self._calls = low
        self._error: type[Exception] = low.NCCLError
        self._nonblocking = nonblocking
        self.version()  # loads the library, or says that there is none

    def version(self) -> str:
        """The version of the library itself."""
        number = int(self._checked("version", self._calls.get_version))
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def unique_id(self) -> bytes:
        """Make the key that the members of a new communicator share; one of them calls this."""
        return bytes(self._checked("making of a key", self._calls.get_unique_id))

    def connect(self, size: int, unique: bytes, rank: int) -> Any:
        """Begin to join a new communicator; all its members do."""
        low = self._calls
        config = low.Config()
        config.blocking = int(not self._nonblocking)
        key = low.UniqueId.from_buffer(unique)
        description = f"joining of {size} ranks, as member {rank},"
        return self._checked(description, low.comm_init_rank_config, size, key, rank, config)

    def is_ready(self, comm: Any) -> bool:
        """True once a communicator has been joined, and its last call is done."""
        low = self._calls
        state = int(self._checked("look for errors", low.comm_get_async_error, comm))
        if state not in (SUCCESS, IN_PROGRESS):
            message = f"{low.get_error_string(state)} {low.get_last_error(comm)}"
            raise CommunicationError(message.strip())
        return state == SUCCESS

    def send(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: int) -> None:
        """Send bytes to member `peer`."""
        try:
            self._calls.send(pointer, nbytes, BYTES, peer, comm, stream)
        except self._error as error:
            raise failed(f"send of {nbytes} bytes to member {peer}", error) from error
        if self._nonblocking:
            self._finish(comm)

    def recv(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: int) -> None:
        """Receive bytes from member `peer`."""
        try:
            self._calls.recv(pointer, nbytes, BYTES, peer, comm, stream)
        except self._error as error:
            raise failed(f"receive of {nbytes} bytes from member {peer}", error) from error
        if self._nonblocking:
            self._finish(comm)

    def all_reduce(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: int
    ) -> None:
        """Reduce `count` elements; each member gets the result."""
        try:
            self._calls.all_reduce(source, target, count, type_, op, comm, stream)
        except self._error as error:
            raise failed(f"all-reduce of {count} elements of type {type_}", error) from error
        if self._nonblocking:
            self._finish(comm)

    def reduce_scatter(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: int
    ) -> None:
        """Reduce; each member gets its part, of `count` elements."""
        try:
            self._calls.reduce_scatter(source, target, count, type_, op, comm, stream)
        except self._error as error:
            raise failed(f"reduce-scatter of {count} elements of type {type_}", error) from error
        if self._nonblocking:
            self._finish(comm)

    def all_gather(self, source: int, target: int, nbytes: int, comm: Any, stream: int) -> None:
        """Give each member the `nbytes` bytes of all, in their order."""
        try:
            self._calls.all_gather(source, target, nbytes, BYTES, comm, stream)
        except self._error as error:
            raise failed(f"all-gather of {nbytes} bytes", error) from error
        if self._nonblocking:
            self._finish(comm)

    def broadcast(
        self, source: int, target: int, nbytes: int, root: int, comm: Any, stream: int
    ) -> None:
        """Give each member the bytes of member `root`."""
        try:
            self._calls.broadcast(source, target, nbytes, BYTES, root, comm, stream)
        except self._error as error:
            raise failed(f"broadcast of {nbytes} bytes from member {root}", error) from error
        if self._nonblocking:
            self._finish(comm)

    def batch(self, messages: Sequence[RawMessage], comm: Any, stream: int) -> None:
        """Send and receive messages as one operation, in which none waits for another."""
        calls = self._calls
        try:
            calls.group_start()
            try:
                for receives, peer, pointer, nbytes in messages:
                    call = calls.recv if receives else calls.send
                    call(pointer, nbytes, BYTES, peer, comm, stream)
            finally:
                calls.group_end()
        except self._error as error:
            # The end of a group fails as well if one of its calls has: the call's error says why.
            within = error.__context__
            first = within if isinstance(within, self._error) else error
            raise failed(f"batch of {batch_in_words(messages)}", first) from error
        if self._nonblocking:
            self._finish(comm)

    def error(self, comm: Any) -> str | None:
        """The failure of a communicator, in words; None if there is none."""
        try:
            self.is_ready(comm)
        except CommunicationError as error:
            return str(error)
        return None

    def abort(self, comm: Any) -> None:
        """Break off the operations under way, and give the communicator up."""
        self._checked("breaking off", self._calls.comm_abort, comm)

    def destroy(self, comm: Any) -> None:
        """Give up a communicator without operations under way."""
        self._checked("giving up of a communicator", self._calls.comm_destroy, comm)

    def _finish(self, comm: Any) -> None:
        """Wait until the last call has put its work on the stream."""
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

    def _checked(self, description: str, call: Any, *arguments: Any) -> Any:
        """Make a call that is rare. Calls that a step makes often have no function around them."""
        try:
            return call(*arguments)
        except self._error as error:
            raise failed(description, error) from error


def failed(words: str, error: Exception) -> CommunicationError:
    """The run time's error for one of nccl4py; `words` is the call, in words."""
    return CommunicationError(f"NCCL's {words} has failed: {error}; NCCL_DEBUG=INFO says more")


def load(nonblocking: bool = False) -> Nccl:
    """NCCL, whose binding is imported here, since most machines have none.

    Args:
        nonblocking: as `Nccl` takes it.

    Raises:
        TransportError: it is not installed; the message says what to install.
    """
    try:
        return Nccl(importlib.import_module("nccl.bindings.nccl"), nonblocking)
    except (ImportError, RuntimeError, OSError) as error:
        raise TransportError(
            f"tensors on GPUs travel by NCCL, and its binding nccl4py cannot be loaded: {error}\n"
            "Install it (pip install 'cg[cuda]'), or keep the step on the CPU by CG_DEVICE=cpu"
        ) from error
