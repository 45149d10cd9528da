"""A library of messages between fake devices, with the codes of NCCL.

Its members are threads or processes of one machine, with a socket between each two. So an operation
stays under way until its other end has come, except for bytes that fit into the sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any
from weakref import WeakSet

import numpy
import torch

from ..streams.library import RawMessage
from .device import FakeDevice, FakeGraph
from .queues import wait

JOIN_SECONDS = 120.0
"""Seconds for the members of a communicator to come, and for graphs to give it up."""


class FakeComm:
    """A member of a communicator: a socket to each other member."""

    def __init__(
        self, folder: str, size: int, unique: bytes, member: int, patience: float | None
    ) -> None:
        self.patience = patience
        self.size = size
        self.member = member
        self.sending: list[int] = []
        self.graphs: WeakSet[FakeGraph] = WeakSet()
        self._last = threading.Event()
        self._last.set()
        self.peers: dict[int, Connection] = {}
        path = os.path.join(folder, unique[:8].hex())
        with Listener(f"{path}-{member}", "AF_UNIX", backlog=size) as listener:
            for peer in range(member):
                self.peers[peer] = _dial(f"{path}-{peer}")
                self.peers[peer].send(member)
            for _ in range(member + 1, size):
                conn = listener.accept()
                self.peers[conn.recv()] = conn

    def in_turn(self, work: Callable[[], None]) -> Callable[[], None]:
        """An operation that begins when those that were put on a stream before it have ended."""
        before, over, patience = self._last, threading.Event(), self.patience
        self._last = over

        def run() -> None:
            try:
                wait(before, "communicator", patience)
                work()
            finally:
                over.set()

        return run

    def exchange(self, mine: bytes) -> list[bytes]:
        """The bytes of all members, in their order."""
        sends = [threading.Thread(target=self._send, args=(peer, mine)) for peer in self.peers]
        for thread in sends:
            thread.start()
        parts = {peer: conn.recv_bytes() for peer, conn in self.peers.items()}
        for thread in sends:
            thread.join()
        parts[self.member] = mine
        return [parts[member] for member in range(self.size)]

    def end_operations(self) -> None:
        """End the operations under way here. As with NCCL, the other ends go on waiting.

        Only where a send waits, which nothing else ends, is the other end told.
        """
        for peer, conn in self.peers.items():
            how = socket.SHUT_RDWR if peer in self.sending else socket.SHUT_RD
            with contextlib.suppress(OSError):  # as when the other end has gone
                end = socket.socket(fileno=os.dup(conn.fileno()))
                with end:
                    end.shutdown(how)

    def close(self) -> None:
        """Close the sockets; whoever waits at another end is told at once."""
        for conn in self.peers.values():
            conn.close()

    def send(self, peer: int, content: bytes) -> None:
        """Send bytes to a member; returns when they are on their way."""
        self.sending.append(peer)
        try:
            self.peers[peer].send_bytes(content)
        finally:
            self.sending.remove(peer)

    def _send(self, peer: int, content: bytes) -> None:
        with contextlib.suppress(OSError):  # as when the communicator is aborted meanwhile
            self.send(peer, content)


def _dial(path: str) -> Connection:
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            return Client(path, "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.002)


_NUMPY: Mapping[int, Any] = {
    0: numpy.int8,
    1: numpy.uint8,
    2: numpy.int32,
    3: numpy.uint32,
    4: numpy.int64,
    5: numpy.uint64,
    6: numpy.float16,
    7: numpy.float32,
    8: numpy.float64,
}
_REDUCE: Mapping[int, Any] = {0: numpy.add, 1: numpy.multiply, 2: numpy.maximum, 3: numpy.minimum}


class FakeLibrary:
    """A `Library`, which works between threads and between processes.

    Args:
        device: of this member.
        folder: where the members of a communicator meet; the same for all, and short.

    Attributes:
        calls: what was called so far, in words, for tests.
        fault: what `error` says, for tests.
    """

    name = "fake"

    def __init__(self, device: FakeDevice, folder: str | None = None) -> None:
        self.device = device
        self.folder = folder or tempfile.gettempdir()
        self.calls: list[str] = []
        self.fault: str | None = None
        self._aborted: list[FakeComm] = []

    def version(self) -> str:
        return "0"

    def unique_id(self) -> bytes:
        return uuid.uuid4().bytes * 8

    def connect(self, size: int, unique: bytes, rank: int) -> FakeComm:
        self.device.before_work()
        while self._aborted:  # those of all members are, so nobody waits at another end
            self._aborted.pop().close()
        self.calls.append(f"connect {rank} of {size}")
        return FakeComm(self.folder, size, unique, rank, self.device.patience)

    def is_ready(self, comm: FakeComm) -> bool:
        return True

    def send(self, pointer: int, nbytes: int, peer: int, comm: FakeComm, stream: int) -> None:
        def work() -> None:
            comm.send(peer, ctypes.string_at(pointer, nbytes))

        self.put(f"send {nbytes}", stream, comm, work)

    def recv(self, pointer: int, nbytes: int, peer: int, comm: FakeComm, stream: int) -> None:
        def work() -> None:
            content = comm.peers[peer].recv_bytes()
            assert len(content) == nbytes, "both ends must agree"
            ctypes.memmove(pointer, content, nbytes)

        self.put(f"recv {nbytes}", stream, comm, work)

    def all_reduce(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: int
    ) -> None:
        def work() -> None:
            total = self._reduced(source, count, type_, op, comm)
            ctypes.memmove(target, total.tobytes(), total.nbytes)

        self.put(f"all_reduce {count}", stream, comm, work)

    def reduce_scatter(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: int
    ) -> None:
        def work() -> None:
            total = self._reduced(source, count * comm.size, type_, op, comm)
            part = total[comm.member * count : (comm.member + 1) * count]
            ctypes.memmove(target, part.tobytes(), part.nbytes)

        self.put(f"reduce_scatter {count}", stream, comm, work)

    def all_gather(self, source: int, target: int, nbytes: int, comm: Any, stream: int) -> None:
        def work() -> None:
            everything = b"".join(comm.exchange(ctypes.string_at(source, nbytes)))
            ctypes.memmove(target, everything, len(everything))

        self.put(f"all_gather {nbytes}", stream, comm, work)

    def broadcast(
        self, source: int, target: int, nbytes: int, root: int, comm: Any, stream: int
    ) -> None:
        def work() -> None:
            content = ctypes.string_at(source, nbytes) if comm.member == root else b""
            ctypes.memmove(target, comm.exchange(content)[root], nbytes)

        self.put(f"broadcast {nbytes}", stream, comm, work)

    def batch(self, messages: Sequence[RawMessage], comm: Any, stream: int) -> None:
        def work() -> None:
            outgoing = {m.peer: ctypes.string_at(m.pointer, m.nbytes) for m in messages if not m[0]}
            own_content = outgoing.pop(comm.member, b"")
            sends = [
                threading.Thread(target=comm.send, args=(peer, content))
                for peer, content in outgoing.items()
            ]
            for thread in sends:
                thread.start()
            for message in messages:
                if message.receives:
                    is_own = message.peer == comm.member
                    content = own_content if is_own else comm.peers[message.peer].recv_bytes()
                    assert len(content) == message.nbytes, "both ends must agree"
                    ctypes.memmove(message.pointer, content, message.nbytes)
            for thread in sends:
                thread.join()

        self.put("batch", stream, comm, work)

    def error(self, comm: FakeComm) -> str | None:
        return self.fault

    def abort(self, comm: FakeComm) -> None:
        self.calls.append("abort")
        comm.end_operations()
        self._outlive_graphs(comm)
        self._aborted.append(comm)

    def destroy(self, comm: FakeComm) -> None:
        self.calls.append("destroy")
        self._outlive_graphs(comm)
        comm.close()

    def _outlive_graphs(self, comm: FakeComm) -> None:
        """Wait until no graph has operations of the communicator, as NCCL does."""
        deadline = time.monotonic() + JOIN_SECONDS
        while comm.graphs:
            assert time.monotonic() < deadline, "a graph still has operations of the communicator"
            time.sleep(0.002)

    def put(self, label: str, stream: int, comm: FakeComm, work: Callable[[], None]) -> None:
        if self.device.recording is not None:
            self.device.recorded_of.append(comm)
        self.calls.append(label)
        self.device.by_raw(stream).put(label, work, comm)

    def _reduced(self, source: int, count: int, type_: int, op: int, comm: FakeComm) -> Any:
        if type_ == 9:  # bf16, which numpy lacks
            parts = comm.exchange(ctypes.string_at(source, count * 2))
            tensors = [torch.frombuffer(bytearray(p), dtype=torch.bfloat16).float() for p in parts]
            arrays = [t.numpy() for t in tensors]
            total = _combine(arrays, op)
            bits = torch.from_numpy(total).to(torch.bfloat16).view(torch.int16)
            return bits.numpy()
        dtype = numpy.dtype(_NUMPY[type_])
        parts = comm.exchange(ctypes.string_at(source, count * dtype.itemsize))
        return _combine([numpy.frombuffer(part, dtype) for part in parts], op)


def _combine(arrays: Sequence[Any], op: int) -> Any:
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = _REDUCE[0 if op == 4 else op](total, array)
    return (total / len(arrays)).astype(total.dtype) if op == 4 else total
