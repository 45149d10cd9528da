"""HCCL's calls behind the protocol that the ports of streams use."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NoReturn

from ..device import Device, DeviceQueue
from ..streams.library import CommunicationError, RawMessage, batch_in_words
from .abi import (
    BYTES,
    NOT_SUPPORTED,
    RECEIVE,
    RESULTS,
    SEND,
    SUCCESS,
    TCP_CONNECT,
    TIMEOUT,
    UNAVAILABLE,
    RootInfo,
    SendRecvItem,
)
from .symbols import Symbols

ROOT_INFO_BYTES = ctypes.sizeof(RootInfo)

HINTS = {
    NOT_SUPPORTED: "This device, or this version of CANN, cannot do it: let the value take another "
    "way by cg.via(x, 'cpu'), or convert it",
    UNAVAILABLE: "Is the port in use? HCCL listens on one for each process that joins others: give "
    "each rank a device of its own, or set HCCL_HOST_SOCKET_PORT_RANGE=auto",
    TIMEOUT: "Some rank did not come in time: look at what the others say. HCCL_CONNECT_TIMEOUT is "
    "how long it waits while ranks are joined, HCCL_EXEC_TIMEOUT while they run, in seconds",
}
HINTS[TCP_CONNECT] = HINTS[UNAVAILABLE]


class HcclLibrary:
    """HCCL, by its functions. Element types and reductions are HCCL's own numbers.

    A stream is given as the device's queue, and its raw handle is asked for at each call: that is
    when torch_npu hands the device all that it has put on its streams so far. A handle that was
    kept would let a message overtake the work that it waits for.

    Args:
        symbols: of the library.
        device: of this rank.
        rank: of this process, for messages.
    """

    name = "HCCL"

    def __init__(self, symbols: Symbols, device: Device, rank: int) -> None:
        self.symbols = symbols
        self._device = device
        self._rank = rank
        self._send = symbols.get("HcclSend")
        self._recv = symbols.get("HcclRecv")
        self._batch = symbols.get("HcclBatchSendRecv")
        self._all_reduce = symbols.get("HcclAllReduce")
        self._reduce_scatter = symbols.get("HcclReduceScatter")
        self._all_gather = symbols.get("HcclAllGather")
        self._broadcast = symbols.get("HcclBroadcast")

    def version(self) -> str:
        """The file of the library, since HCCL has no version number."""
        return self.symbols.path

    # -- joining ----------------------------------------------------------------------------

    def unique_id(self) -> bytes:
        """Make a communicator's key; the process listens for the other members until it joins."""
        info = RootInfo()
        code = self.symbols.get("HcclGetRootInfo")(ctypes.byref(info))
        if code != SUCCESS:
            self._fail("HcclGetRootInfo", code, "to begin a communicator")
        return bytes(info)

    def connect(self, size: int, unique: bytes, rank: int) -> Any:
        """Join a new communicator; blocks until all come, or HCCL_CONNECT_TIMEOUT passes."""
        if len(unique) != ROOT_INFO_BYTES:
            raise CommunicationError(
                f"rank {self._rank}: HCCL's root info has {ROOT_INFO_BYTES} bytes, and "
                f"{len(unique)} were given"
            )
        info, comm = RootInfo.from_buffer_copy(unique), ctypes.c_void_p()
        code = self.symbols.get("HcclCommInitRootInfo")(
            size, ctypes.byref(info), rank, ctypes.byref(comm)
        )
        if code != SUCCESS:
            self._fail("HcclCommInitRootInfo", code, f"as member {rank} of {size}")
        return comm.value

    def is_ready(self, comm: Any) -> bool:
        """True: `connect` has waited."""
        return True

    def destroy(self, comm: Any) -> None:
        """Give up a communicator without operations under way."""
        code = self.symbols.get("HcclCommDestroy")(comm)
        if code != SUCCESS:
            self._fail("HcclCommDestroy", code, "to give up a communicator")

    def error(self, comm: Any) -> str | None:
        """The failure of a communicator; None also if this version of HCCL cannot tell."""
        if not self.symbols.has("HcclGetCommAsyncError"):
            return None
        failure = ctypes.c_int32(SUCCESS)
        code = self.symbols.get("HcclGetCommAsyncError")(comm, ctypes.byref(failure))
        problem = code or failure.value
        return None if problem == SUCCESS else self._described(problem)

    def abort(self, comm: Any) -> NoReturn:
        """Raise, since HCCL cannot break operations off.

        Raises:
            CommunicationError: always.
        """
        raise CommunicationError("HCCL cannot break off what is under way")

    # -- on streams -------------------------------------------------------------------------

    def send(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: Any) -> None:
        """Send bytes to member `peer`."""
        code = self._send(pointer, nbytes, BYTES, peer, comm, self._raw(stream))
        if code != SUCCESS:
            self._fail("HcclSend", code, f"of {nbytes} bytes to member {peer}")

    def recv(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: Any) -> None:
        """Receive bytes from member `peer`."""
        code = self._recv(pointer, nbytes, BYTES, peer, comm, self._raw(stream))
        if code != SUCCESS:
            self._fail("HcclRecv", code, f"of {nbytes} bytes from member {peer}")

    def batch(self, messages: Sequence[RawMessage], comm: Any, stream: Any) -> None:
        """Send and receive messages by one HcclBatchSendRecv, in which none waits for another.

        HCCL takes one message in each direction between two ranks, and the same ones at both ends.
        """
        items = [
            SendRecvItem(RECEIVE if m.receives else SEND, m.pointer, m.nbytes, BYTES, m.peer)
            for m in messages
        ]
        array = (SendRecvItem * len(items))(*items)
        code = self._batch(array, len(items), comm, self._raw(stream))
        if code != SUCCESS:
            self._fail("HcclBatchSendRecv", code, f"of {batch_in_words(messages)}")

    def all_reduce(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: Any
    ) -> None:
        """Reduce `count` elements; each member gets the result."""
        code = self._all_reduce(source, target, count, type_, op, comm, self._raw(stream))
        if code != SUCCESS:
            self._fail("HcclAllReduce", code, f"of {count} elements of type {type_}, op {op}")

    def reduce_scatter(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: Any
    ) -> None:
        """Reduce; each member gets its part, of `count` elements."""
        code = self._reduce_scatter(source, target, count, type_, op, comm, self._raw(stream))
        if code != SUCCESS:
            self._fail("HcclReduceScatter", code, f"of {count} elements of type {type_}, op {op}")

    def all_gather(self, source: int, target: int, nbytes: int, comm: Any, stream: Any) -> None:
        """Give each member the `nbytes` bytes of all, in their order."""
        code = self._all_gather(source, target, nbytes, BYTES, comm, self._raw(stream))
        if code != SUCCESS:
            self._fail("HcclAllGather", code, f"of {nbytes} bytes")

    def broadcast(
        self, source: int, target: int, nbytes: int, root: int, comm: Any, stream: Any
    ) -> None:
        """Give each member the root's bytes, in place: on the root they are in `target`, too."""
        code = self._broadcast(target, nbytes, BYTES, root, comm, self._raw(stream))
        if code != SUCCESS:
            self._fail("HcclBroadcast", code, f"of {nbytes} bytes from member {root}")

    def _raw(self, queue: DeviceQueue) -> int:
        return self._device.raw(queue)

    # -- errors -----------------------------------------------------------------------------

    def _described(self, code: int) -> str:
        text = RESULTS.get(code, "an unknown error")
        if self.symbols.has("HcclGetErrorString"):
            message = self.symbols.get("HcclGetErrorString")(code)
            text = message.decode(errors="replace") if message else text
        return f"{text} (HCCL result {code})"

    def _fail(self, function: str, code: int, details: str) -> NoReturn:
        hint = HINTS.get(code)
        raise CommunicationError(
            f"rank {self._rank}: {function} {details}: {self._described(code)}"
            + (f". {hint}" if hint else "")
        )
