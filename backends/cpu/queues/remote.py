"""Lanes between machines: MPI messages, never blocking.

A tensor with a planned slot goes through a persistent request on a buffer of that slot. Any other
tensor is sent from and received into storage of its own. An object is a head of bounded size,
which carries its length and its beginning, and then the rest, if any, under a second tag. An error
in place of a tensor is an empty message, followed by its length and its bytes under the second tag.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from os import sched_yield
from typing import Any

import torch

from ..memory.codecs import TensorCodec, UnitCodec
from ..memory.layout import POISON, SIZE_MASK
from ..mpi import module_of
from .messages import Active, Incoming, Outgoing

_LENGTH = struct.Struct("<Q")
HEAD_BYTES = 4096
_INLINE = HEAD_BYTES - _LENGTH.size


@dataclass(slots=True)
class Counts:
    """How many messages have been issued under a lane's two tags since the last reset."""

    heads: int = 0
    rests: int = 0


def storage(nbytes: int) -> memoryview:
    """Uninitialised memory, aligned for any dtype."""
    return torch.empty(nbytes, dtype=torch.uint8).numpy().data


@dataclass(slots=True)
class _Sent:
    """A message whose requests are under way."""

    message: Outgoing
    requests: list[Any]
    keep: list[Any] = field(default_factory=list)


class RemoteSender:
    """Sends to one rank of another machine.

    Args:
        comm: the communicator of payloads.
        peer: the receiving rank.
        tag: this lane's tag; the next one is its too.
        active: where to register while messages are under way.
    """

    def __init__(self, comm: Any, peer: int, tag: int, active: Active) -> None:
        self.peer = peer
        self.counts = Counts()
        self._comm = comm
        self._tag = tag
        self._active = active
        self._queue: deque[Outgoing] = deque()
        self._sent: deque[_Sent] = deque()
        self._busy: set[int] = set()
        self._persistent: dict[tuple[int, int], tuple[Any, memoryview]] = {}

    def push(self, message: Outgoing) -> None:
        """See `SendLane`."""
        message.keep()  # MPI reads it until the other side has it
        self._queue.append(message)
        self._active[self] = None
        self._issue()

    def progress(self) -> None:
        """See `SendLane`."""
        sent = self._sent
        while sent and _all_done(sent[0].requests):
            done = sent.popleft()
            if done.message.slot is not None:
                self._busy.discard(done.message.slot)
            done.message.finish()
        self._issue()
        if not sent and not self._queue:
            self._active.pop(self, None)

    def reset(self, posted: Counts) -> None:
        """Send empty messages for what the receiver has asked for in vain, and forget the rest.

        Args:
            posted: what the receiver has asked for.
        """
        self._queue.clear()
        for tag, missing in (
            (self._tag, posted.heads - self.counts.heads),
            (self._tag + 1, posted.rests - self.counts.rests),
        ):
            for _ in range(missing):
                empty = storage(0)
                request = self._comm.Isend(empty, self.peer, tag)
                self._sent.append(_Sent(Outgoing(UnitCodec()), [request], [empty]))

    def finish_reset(self) -> bool:
        """Whether everything sent has been received; then the lane is as new."""
        while self._sent and _all_done(self._sent[0].requests):
            self._sent.popleft()
        if self._sent:
            return False
        self._busy.clear()
        self._active.pop(self, None)
        self.counts = Counts()
        return True

    def close(self) -> None:
        """Give back the persistent requests that are not under way."""
        for (slot, _), (request, _) in self._persistent.items():
            if slot not in self._busy:
                request.Free()
        self._persistent.clear()
        self._active.pop(self, None)

    def _issue(self) -> None:
        queue = self._queue
        while queue and (queue[0].slot is None or queue[0].slot not in self._busy):
            self._sent.append(self._start(queue.popleft()))

    def _start(self, message: Outgoing) -> _Sent:
        self.counts.heads += 1
        codec = message.codec
        if not isinstance(codec, TensorCodec):
            return self._start_object(message)
        if message.mark:
            return self._start_poison(message)
        if message.slot is None:
            content = codec.contiguous_bytes(message.prepared) if message.nbytes else storage(1)
            request = self._comm.Isend(content, self.peer, self._tag)
            return _Sent(message, [request], [content])
        request, buffer = self._persistent_for(message.slot, message.nbytes)
        message.write(message.slot, buffer, 0)
        self._busy.add(message.slot)
        request.Start()
        return _Sent(message, [request])

    def _start_poison(self, message: Outgoing) -> _Sent:
        if message.slot is not None:
            self._busy.add(message.slot)
        content = storage(_LENGTH.size + message.nbytes)
        _LENGTH.pack_into(content, 0, message.nbytes)
        message.write(-1, content, _LENGTH.size)
        self.counts.rests += 2
        parts = (content[:0], content[: _LENGTH.size], content[_LENGTH.size :])
        tags = (self._tag, self._tag + 1, self._tag + 1)
        requests = [
            self._comm.Isend(part, self.peer, tag) for part, tag in zip(parts, tags, strict=True)
        ]
        return _Sent(message, requests, [content])

    def _start_object(self, message: Outgoing) -> _Sent:
        content = storage(_LENGTH.size + message.nbytes)
        _LENGTH.pack_into(content, 0, message.nbytes | message.mark)
        message.write(-1, content, _LENGTH.size)
        requests = [self._comm.Isend(content[:HEAD_BYTES], self.peer, self._tag)]
        if message.nbytes > _INLINE:
            self.counts.rests += 1
            requests.append(self._comm.Isend(content[HEAD_BYTES:], self.peer, self._tag + 1))
        return _Sent(message, requests, [content])

    def _persistent_for(self, slot: int, nbytes: int) -> tuple[Any, memoryview]:
        known = self._persistent.get((slot, nbytes))
        if known is None:
            buffer = storage(max(nbytes, 1))
            request = self._comm.Send_init(buffer, self.peer, self._tag)
            known = self._persistent[slot, nbytes] = (request, buffer)
        return known


class _Stage(enum.Enum):
    """What the request of a message that has been asked for will bring."""

    TENSOR = enum.auto()
    HEAD = enum.auto()
    LENGTH = enum.auto()
    REST = enum.auto()


@dataclass(slots=True)
class _Expected:
    """A message that has been asked for."""

    message: Incoming
    request: Any
    buffer: memoryview
    nbytes: int
    stage: _Stage
    mark: int = 0


class RemoteReceiver:
    """Receives from one rank of another machine.

    Args:
        comm: the communicator of payloads.
        peer: the sending rank.
        tag: this lane's tag; the next one is its too.
        active: where to register while messages are awaited.
    """

    def __init__(self, comm: Any, peer: int, tag: int, active: Active) -> None:
        self.peer = peer
        self.counts = Counts()
        self._comm = comm
        self._tag = tag
        self._active = active
        mpi = module_of(comm)
        self._status = mpi.Status()
        self._byte = mpi.BYTE
        self._queue: deque[Incoming] = deque()
        self._expected: deque[_Expected] = deque()
        self._busy: set[int] = set()
        self._persistent: dict[tuple[int, int], tuple[Any, memoryview]] = {}

    def post(self, message: Incoming) -> None:
        """See `ReceiveLane`."""
        message.clear()
        self._queue.append(message)
        self._active[self] = None
        self._issue()

    def progress(self) -> None:
        """See `ReceiveLane`."""
        self._issue()
        expected = self._expected
        while expected and expected[0].request.Test(self._status):
            head = expected[0]
            if not self._is_whole(head):
                continue
            expected.popleft()
            message = head.message
            slot = -1 if message.slot is None else message.slot
            message.arrive(slot, head.buffer, 0, head.nbytes, slot < 0, head.mark)
            if message.slot is not None and (not message.hold or message.error is not None):
                self.release(message)
        if not expected and not self._queue:
            self._active.pop(self, None)

    def release(self, message: Incoming) -> None:
        """See `ReceiveLane`."""
        if message.slot is not None:
            self._busy.discard(message.slot)
        self._issue()

    def drain(self, sent: Counts, is_late: Callable[[], bool]) -> bool:
        """Receive and drop what has been sent and nobody has asked for.

        Args:
            sent: what the sender has sent.
            is_late: whether to wait no longer.

        Returns:
            Whether all of it has come.
        """
        self._queue.clear()
        for tag, extra in (
            (self._tag, sent.heads - self.counts.heads),
            (self._tag + 1, sent.rests - self.counts.rests),
        ):
            status = module_of(self._comm).Status()
            for _ in range(extra):
                while (message := self._comm.Improbe(self.peer, tag, status)) is None:
                    if is_late():
                        return False
                    sched_yield()
                message.Recv(storage(status.Get_count(module_of(self._comm).BYTE)))
        return True

    def finish_reset(self) -> bool:
        """Whether everything asked for has come; then the lane is as new."""
        while self._expected and self._expected[0].request.Test():
            self._expected.popleft()
        if self._expected:
            return False
        self._busy.clear()
        self._active.pop(self, None)
        self.counts = Counts()
        return True

    def close(self) -> None:
        """Give back the persistent requests that are not under way."""
        waiting = {id(expected.request) for expected in self._expected}
        for request, _ in self._persistent.values():
            if id(request) not in waiting:
                request.Free()
        self._persistent.clear()
        self._active.pop(self, None)

    def _issue(self) -> None:
        queue = self._queue
        while queue and (queue[0].slot is None or queue[0].slot not in self._busy):
            self._expected.append(self._start(queue.popleft()))

    def _start(self, message: Incoming) -> _Expected:
        self.counts.heads += 1
        codec = message.codec
        if not isinstance(codec, TensorCodec):
            buffer = storage(HEAD_BYTES)
            request = self._comm.Irecv(buffer, self.peer, self._tag)
            return _Expected(message, request, buffer, 0, _Stage.HEAD)
        assert codec.nbytes is not None
        if message.slot is None:
            buffer = storage(max(codec.nbytes, 1))
            request = self._comm.Irecv(buffer, self.peer, self._tag)
            return _Expected(message, request, buffer, codec.nbytes, _Stage.TENSOR)
        request, buffer = self._persistent_for(message.slot, codec.nbytes)
        self._busy.add(message.slot)
        request.Start()
        return _Expected(message, request, buffer, codec.nbytes, _Stage.TENSOR)

    def _is_whole(self, expected: _Expected) -> bool:
        """Take in what a request has brought; ask for what is still to come, if anything is."""
        if expected.stage is _Stage.HEAD:
            return self._read_head(expected)
        if expected.stage is _Stage.LENGTH:
            (nbytes,) = _LENGTH.unpack_from(expected.buffer, 0)
            self._ask(expected, storage(nbytes), nbytes, _Stage.REST)
            return False
        if expected.stage is _Stage.TENSOR and not self._status.Get_count(self._byte):
            expected.mark = POISON
            self._ask(expected, storage(_LENGTH.size), 0, _Stage.LENGTH)
            return False
        return True

    def _ask(self, expected: _Expected, buffer: memoryview, nbytes: int, stage: _Stage) -> None:
        self.counts.rests += 1
        expected.buffer, expected.nbytes, expected.stage = buffer, nbytes, stage
        expected.request = self._comm.Irecv(buffer, self.peer, self._tag + 1)

    def _read_head(self, expected: _Expected) -> bool:
        """Turn an object's head into the message; ask for the rest if there is one."""
        (length,) = _LENGTH.unpack_from(expected.buffer, 0)
        nbytes = length & SIZE_MASK
        whole = storage(nbytes)
        inline = min(nbytes, _INLINE)
        whole[:inline] = expected.buffer[_LENGTH.size : _LENGTH.size + inline]
        expected.buffer, expected.nbytes, expected.stage = whole, nbytes, _Stage.REST
        expected.mark = length & ~SIZE_MASK
        if nbytes <= _INLINE:
            return True
        self.counts.rests += 1
        expected.request = self._comm.Irecv(whole[inline:], self.peer, self._tag + 1)
        return False

    def _persistent_for(self, slot: int, nbytes: int) -> tuple[Any, memoryview]:
        known = self._persistent.get((slot, nbytes))
        if known is None:
            buffer = storage(max(nbytes, 1))
            request = self._comm.Recv_init(buffer, self.peer, self._tag)
            known = self._persistent[slot, nbytes] = (request, buffer)
        return known


def _all_done(requests: list[Any]) -> bool:
    return all(request.Test() for request in requests)
