"""Queues between machines: MPI messages, never blocking.

A message has one part or two; the second has a tag of its own. A tensor is the first part. It goes
through a persistent request on a buffer of its planned slot, if it has one, else from and into
storage of its own. An error in place of a tensor is the second part, after an empty first one. The
first part of any other message has the length and the beginning, the second part the rest.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from os import sched_yield
from typing import Any, Generic, TypeVar

import torch

from ..memory.codecs import TensorCodec
from ..memory.layout import POISON, SIZE_MASK
from ..waiting.mpi_module import module_of
from .messages import Active, Incoming, Outgoing

_LENGTH = struct.Struct("<Q")
HEAD_BYTES = 4096
"""The most bytes of a first part that is no tensor."""

Message = TypeVar("Message", Outgoing, Incoming)


@dataclass(slots=True)
class Counts:
    """Numbers of messages issued under a queue's two tags since the last reset."""

    heads: int = 0
    rests: int = 0


def storage(nbytes: int) -> memoryview:
    """Uninitialised memory, aligned for any dtype."""
    return torch.empty(nbytes, dtype=torch.uint8).numpy().data


@dataclass(slots=True)
class _UnderWay(Generic[Message]):
    """A message whose requests are under way.

    Attributes:
        message: the message; None for an empty one, which completes a receive that was posted in
            vain.
        requests: the MPI requests of its parts.
        steps: receives the message, and ends when it has come.
        content: the memory that MPI reads.
    """

    message: Message | None
    requests: list[Any]
    steps: Generator[None, None, None] | None = None
    content: Any = None

    @property
    def is_done(self) -> bool:
        """Return whether all requests are complete."""
        return all(request.Test() for request in self.requests)


class _RemoteQueue(Generic[Message]):
    """The state and the requests that both sides have.

    Args:
        comm: the communicator of payloads.
        peer: the rank on the other side.
        tag: the first of this queue's two tags; the second is the next number.
        active: where to register while messages are under way.
    """

    def __init__(self, comm: Any, peer: int, tag: int, active: Active) -> None:
        self.peer = peer
        self.counts = Counts()
        self._comm = comm
        self._tag = tag
        self._active = active
        self._unposted: deque[Message] = deque()
        self._under_way: deque[_UnderWay[Message]] = deque()
        self._busy: set[int | None] = set()
        self._persistent: dict[tuple[int, int], tuple[Any, memoryview]] = {}

    def finish_reset(self) -> bool:
        """Return whether everything under way is complete, so that the queue has been reset."""
        while self._under_way and self._under_way[0].is_done:
            self._under_way.popleft()
        if self._under_way:
            return False
        self._busy.clear()
        self._active.pop(self, None)
        self.counts = Counts()
        return True

    def close(self) -> None:
        """Give back the persistent requests that are not under way."""
        waiting = {id(request) for pending in self._under_way for request in pending.requests}
        for request, _ in self._persistent.values():
            if id(request) not in waiting:
                request.Free()
        self._persistent.clear()
        self._active.pop(self, None)

    def _post_unblocked(self) -> None:
        """Post the messages that wait, up to the first whose slot is in use."""
        while self._unposted and self._unposted[0].slot not in self._busy:
            message = self._unposted.popleft()
            if message.slot is not None:
                self._busy.add(message.slot)
            self.counts.heads += 1
            self._under_way.append(self._post(message))

    def _post(self, message: Message) -> _UnderWay[Message]:
        raise NotImplementedError

    def _persistent_for(
        self, slot: int, nbytes: int, make: Callable[..., Any]
    ) -> tuple[Any, memoryview]:
        known = self._persistent.get((slot, nbytes))
        if known is None:
            buffer = storage(max(nbytes, 1))
            known = self._persistent[slot, nbytes] = make(buffer, self.peer, self._tag), buffer
        return known

    def _progress(self) -> None:
        self._post_unblocked()
        if not self._under_way and not self._unposted:
            self._active.pop(self, None)


class RemoteSender(_RemoteQueue[Outgoing]):
    """Sends to one rank of another machine; a `SendQueue`."""

    def send(self, message: Outgoing) -> None:
        """Send a loaded message, after all those before it."""
        message.keep()  # MPI reads it until the other side has it
        self._unposted.append(message)
        self._active[self] = None
        self._post_unblocked()

    def progress(self) -> None:
        """Note what has been sent, and post what no slot holds back."""
        while self._under_way and self._under_way[0].is_done:
            message = self._under_way.popleft().message
            if message is not None:
                self._busy.discard(message.slot)
                message.finish()
        self._progress()

    def reset(self, posted: Counts) -> None:
        """Complete receives that were posted in vain by empty messages; forget what waits.

        Args:
            posted: how many receives the receiver has posted.
        """
        self._unposted.clear()
        for _ in range(posted.heads - self.counts.heads):
            self._under_way.append(self._sent(None, [storage(0)]))

    def _post(self, message: Outgoing) -> _UnderWay[Outgoing]:
        codec = message.codec
        is_tensor = isinstance(codec, TensorCodec)
        if isinstance(codec, TensorCodec) and not message.mark:
            if message.slot is None:
                content = codec.contiguous_bytes(message.prepared) if message.nbytes else storage(1)
                return self._sent(message, [content])
            make = self._comm.Send_init
            request, buffer = self._persistent_for(message.slot, message.nbytes, make)
            message.write(buffer, 0)
            request.Start()
            return _UnderWay(message, [request])
        begin = 0 if is_tensor else _LENGTH.size
        content = storage(begin + message.nbytes)
        if begin:
            _LENGTH.pack_into(content, 0, message.nbytes | message.mark)
        message.write(content, begin)
        first = 0 if is_tensor else HEAD_BYTES
        parts = [content[:first], content[first:]]
        if not len(parts[1]):
            return self._sent(message, parts[:1])
        self.counts.rests += 1
        return self._sent(message, parts)

    def _sent(self, message: Outgoing | None, parts: list[Any]) -> _UnderWay[Outgoing]:
        requests = [
            self._comm.Isend(part, self.peer, self._tag + index) for index, part in enumerate(parts)
        ]
        return _UnderWay(message, requests, content=parts)


class RemoteReceiver(_RemoteQueue[Incoming]):
    """Receives from one rank of another machine; a `RecvQueue`."""

    def __init__(self, comm: Any, peer: int, tag: int, active: Active) -> None:
        super().__init__(comm, peer, tag, active)
        mpi = module_of(comm)
        self._status = mpi.Status()
        self._byte = mpi.BYTE

    def post(self, message: Incoming) -> None:
        """Receive the next message into `message`."""
        message.clear()
        self._unposted.append(message)
        self._active[self] = None
        self._post_unblocked()

    def progress(self) -> None:
        """Note what has arrived, and post the receives that wait."""
        self._post_unblocked()
        under_way = self._under_way
        while under_way:
            message, steps = under_way[0].message, under_way[0].steps
            assert message is not None
            assert steps is not None
            next(steps, None)
            if not message.done:
                break
            under_way.popleft()
            if not message.hold or message.error is not None:
                self.release(message)
        self._progress()

    def release(self, message: Incoming) -> None:
        """Let the slot of a message be received into again."""
        if message.slot is not None:
            self._busy.discard(message.slot)
        self._post_unblocked()

    def drain(self, sent: Counts, is_late: Callable[[], bool]) -> bool:
        """Receive and drop messages that were sent, and for which no receive is posted.

        Args:
            sent: how many messages the sender has sent.
            is_late: returns whether to wait no longer.

        Returns:
            Whether all of it has come.
        """
        self._unposted.clear()
        for tag, extra in (
            (self._tag, sent.heads - self.counts.heads),
            (self._tag + 1, sent.rests - self.counts.rests),
        ):
            for _ in range(extra):
                while (part := self._comm.Improbe(self.peer, tag, self._status)) is None:
                    if is_late():
                        return False
                    sched_yield()
                part.Recv(storage(self._status.Get_count(self._byte)))
        return True

    def _post(self, message: Incoming) -> _UnderWay[Incoming]:
        codec = message.codec
        nbytes = codec.nbytes if isinstance(codec, TensorCodec) else HEAD_BYTES
        assert nbytes is not None
        if message.slot is None or not isinstance(codec, TensorCodec):
            buffer = storage(max(nbytes, 1))
            request = self._comm.Irecv(buffer, self.peer, self._tag)
        else:
            make = self._comm.Recv_init
            request, buffer = self._persistent_for(message.slot, nbytes, make)
            request.Start()
        under_way = _UnderWay(message, [request])
        under_way.steps = self._receive(under_way, message, buffer)
        return under_way

    def _receive(
        self, under_way: _UnderWay[Incoming], message: Incoming, first: memoryview
    ) -> Generator[None, None, None]:
        """Receive a message whose first receive is posted; yields while a part is missing."""
        while not under_way.requests[0].Test(self._status):
            yield
        count = self._status.Get_count(self._byte)
        codec, private = message.codec, message.slot is None
        if isinstance(codec, TensorCodec):
            content = first if count else first[:0]
            nbytes, mark = (codec.nbytes, 0) if count else (None, POISON)
        else:
            content = first[_LENGTH.size : count]
            (length,) = _LENGTH.unpack_from(first)
            nbytes, mark = length & SIZE_MASK, length & ~SIZE_MASK
        if nbytes is None or nbytes > len(content):
            while (part := self._comm.Improbe(self.peer, self._tag + 1, self._status)) is None:
                yield
            self.counts.rests += 1
            begin = len(content)
            nbytes = begin + self._status.Get_count(self._byte)
            whole = storage(nbytes)
            whole[:begin] = content
            content = whole
            under_way.requests[0] = part.Irecv(content[begin:])
            while not under_way.requests[0].Test():
                yield
        message.arrive(content, 0, nbytes, private, mark)
