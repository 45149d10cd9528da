"""The HCCL communicators of a process: joined one after the other, and never broken off."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import ClassVar

from ...ir.attributes import Stream
from ...ir.ops.module import Channel
from ..base import World
from ..device import Device, DeviceQueue
from ..streams.groups import CommunicatorGroup, Lease, Line
from ..streams.library import CommunicationError, RawMessage
from ..streams.pool import FLOAT_BYTES, Pool
from .library import HcclLibrary

LIMIT = 32
"""Communicators that a rank may be a member of. HCCL takes 400 MB of device memory for each, or
twice HCCL_BUFFSIZE; in a pipeline of any length a rank has two."""

GRACE_SECONDS = 5.0
"""Seconds for the messages that were under way at a failure to end."""


@dataclass(frozen=True)
class Pair(CommunicatorGroup):
    """Two ranks that send to each other, each way by the same communicator."""

    def __str__(self) -> str:
        return f"ranks {self.ranks[0]} and {self.ranks[1]}"


class HcclPool(Pool):
    """The HCCL communicators of this process.

    A rank's messages go one after the other, so one communicator serves both directions between two
    ranks. Messages that are one operation have to be on one communicator.

    HCCL cannot break operations off. So after a failure the streams get some time to become empty.
    If they do on all ranks, every message has met its other end, and the communicators can be used
    as before. If not, a device waits for a message that never comes, until HCCL_EXEC_TIMEOUT.
    Nothing can be sent after it, and all ranks are told so.
    """

    library_name: ClassVar[str] = "HCCL"
    device_name: ClassVar[str] = "NPU"
    limit: ClassVar[int] = LIMIT
    needs: ClassVar[str] = (
        "Two ranks that send to each other take one, and so does each group of a collective"
    )
    connect_seconds: ClassVar[float | None] = None  # HCCL_CONNECT_TIMEOUT is
    logs: ClassVar[str] = "HCCL's own log"

    def __init__(
        self,
        world: World,
        device: Device | None,
        library: HcclLibrary | None,
        grace: float = GRACE_SECONDS,
    ) -> None:
        super().__init__(world, device, library)
        self._grace = grace
        self._lost: str | None = None

    def handle(self, queue: DeviceQueue) -> DeviceQueue:
        """The queue itself, since its raw handle has to be asked for at each call."""
        return queue

    def group_of(self, channel: Channel) -> CommunicatorGroup:
        """The group of a channel: for an edge, the pair of its two ends."""
        if channel.collective:
            return super().group_of(channel)
        return Pair(tuple(sorted(channel.ranks)), collective=False)

    def join(self, channels: Iterable[Channel]) -> Lease:
        """Become a member of the communicators that the channels need; collective.

        Raises:
            BindError: some rank would be a member of too many, with those of open plans.
            CommunicationError: one cannot be joined, or a failure has left messages under way.
        """
        if self._lost is not None:
            raise CommunicationError(self._lost)
        return super().join(channels)

    def abort(self) -> None:
        """Break nothing off, since HCCL cannot; `reset` waits for the operations under way."""
        self._is_broken = True

    def release_device(self) -> None:
        """Do nothing, since HCCL breaks nothing off: its operations end by HCCL_EXEC_TIMEOUT."""

    def reset(self) -> None:
        """Return if all operations under way have ended; collective.

        Raises:
            CommunicationError: some have not, on some rank.
        """
        if self._lost is not None:
            raise CommunicationError(self._lost)
        if not self._is_broken:
            return
        self._is_broken = False
        stuck = [
            f"rank {rank}: {why}"
            for rank, why in enumerate(self._world.allgather(self._unfinished()))
            if why is not None
        ]
        if stuck:
            self._lost = (
                "an earlier execution has failed while messages between NPUs were under way, and "
                "HCCL cannot break them off (" + "; ".join(stuck) + "). Nothing more can be sent "
                "in this job: end it, and start again from a checkpoint"
            )
            raise CommunicationError(self._lost)

    def close(self) -> None:
        """Give all communicators up, but for those with operations under way; idempotent."""
        if self._lost is not None or self._is_broken:
            self._groups.clear()
            return
        super().close()

    def _unfinished(self) -> str | None:
        """The operation that keeps this rank's streams busy; None if they are empty."""
        if not self._lines():
            return None
        device = self.device
        events = []
        for kind in (Stream.MESSAGE, Stream.COLLECTIVE, Stream.GATHER, Stream.REDUCE):
            event = device.event()
            event.record(device.stream(kind))
            events.append(event)
        deadline = monotonic() + self._grace
        try:
            while not all(event.query() for event in events):
                if monotonic() > deadline:
                    return "; ".join(self.errors()) or "a message waits for its other end"
                sleep(0.002)
        except RuntimeError as error:  # what torch_npu raises once a stream has failed
            return "; ".join(self.errors()) or str(error)
        return None

    def _warm_edge(self, line: Line, source: int, target: int) -> None:
        """Send a number over the line, each way alone, and both at once if HCCL has batches."""
        library, stream = self.library, self._stream(Stream.MESSAGE)
        assert isinstance(library, HcclLibrary), "the pool was made with one"
        peer, comm = line.peer, line.comm
        for sender in (0, 1):
            if line.member == sender:
                library.send(source, FLOAT_BYTES, peer, comm, stream)
            else:
                library.recv(target, FLOAT_BYTES, peer, comm, stream)
        if library.symbols.has("HcclBatchSendRecv"):
            directions = ((False, source), (True, target))
            library.batch(
                [RawMessage(r, peer, at, FLOAT_BYTES) for r, at in directions], comm, stream
            )

    def _connect(self, groups: Sequence[CommunicatorGroup]) -> None:
        """Join one group after the other: a process listens for the members of one at a time."""
        for group in groups:
            super()._connect((group,))
