"""The NCCL communicators of a process, which can be broken off and made anew."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import replace
from time import monotonic
from typing import ClassVar

import torch

from ...ir.flops import Flops
from ...ir.ops.module import Channel
from ...ir.types import DType
from ..base import World
from ..device import Device
from ..streams.groups import CommunicatorGroup, Lease
from ..streams.library import CommunicationError, Library
from ..streams.pool import Pool

LIMIT = 32
"""Communicators that a rank may be a member of. Each takes some 500 MB of device memory and, while
its operations run, multiprocessors. In a pipeline a rank has four, on 64 ranks as on 3. Where each
of 64 ranks sends to each other one, it would have 126: such a plan is refused. Those of open plans
count together; those that only closed ones have used make room."""

CONNECT_SECONDS = 120.0
"""Seconds that the members of a communicator have to join it. NCCL itself waits for ever."""

ABORT_SECONDS = 10.0

NARROW = 2
"""Multiprocessors for messages in the background, at the least. While a receive waits it occupies
them, and as many as NCCL sees fit cost an H200 up to a quarter of what it computes meanwhile."""

BYTES_EACH = 8 << 20
"""The most bytes of a message for each multiprocessor; they take half a millisecond."""

WIDE = 16
"""The number of multiprocessors from which on the choice is left to NCCL."""

BYTES_A_SECOND = 16.5e9
"""The rate of one multiprocessor of an H200 over NVLink; NCCL gives each its own channel."""

FLOPS_A_SECOND = dict.fromkeys(DType, 400e12) | {
    DType.F8E4M3: 800e12,
    DType.F8E5M2: 800e12,
    DType.F32: 40e12,
    DType.F64: 40e12,
    DType.C64: 10e12,
    DType.C128: 10e12,
}
"""The speed of an H200 in work beside which messages are worth hiding, about half of its peak. A
complex product counts once and is four real ones. A speed that is wrong by a factor of four changes
the square root below by a factor of two, but float32 and bfloat16 are ten apart."""

TF32_A_SECOND = 200e12
"""The same in float32, if torch may round the factors of products to TF32. Convolutions, for which
it may unless it is told not to, count as products do."""

MULTIPROCESSORS = 132
"""Of an H200."""

EXPOSED = 0.25
"""About the share of its time by which a message in the background still delays its rank."""


def width_of(channel: Channel, tf32: bool = False) -> int | None:
    """The number of multiprocessors for the messages of a channel; None for NCCL's choice.

    With w of n multiprocessors a message takes t / w, of which a share s delays its rank, and work
    of c seconds meanwhile takes c * w / n longer. The sum is least at w = sqrt(s * n * t / c).
    Widths are powers of two, since each one on an edge is a communicator of its own.

    Args:
        channel: an edge, planned.
        tf32: True if products in float32 are rounded to TF32.

    Source: measured on H200s with 4 MiB messages beside products of 1024 by 1024 elements, and with
    16 MiB messages beside layers of a Llama; `docs/design/0030-devices.md` has the figures.
    """
    if channel.background is None or not channel.slot_bytes:
        return None
    least = max(NARROW, -(-channel.slot_bytes // BYTES_EACH))
    computing = seconds_of(channel.background, tf32)
    sending = channel.slot_bytes / BYTES_A_SECOND
    if EXPOSED * MULTIPROCESSORS * sending >= WIDE**2 * computing:
        return None
    best = math.sqrt(EXPOSED * MULTIPROCESSORS * sending / computing)
    width = max(1 << (least - 1).bit_length(), 1 << round(math.log2(max(best, 1.0))))
    return width if width < WIDE else None


def seconds_of(flops: Flops, tf32: bool) -> float:
    """The seconds that an H200 takes for operations; `tf32` rounds factors in float32."""
    speeds = FLOPS_A_SECOND | ({DType.F32: TF32_A_SECOND} if tf32 else {})
    return sum(count / speeds[dtype] for dtype, count in flops.counts)


def may_round_to_tf32() -> bool:
    """True if a setting lets torch round the factors of matrix products to TF32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


class NcclPool(Pool):
    """The NCCL communicators of this process; a failure breaks off the operations under way."""

    library_name: ClassVar[str] = "NCCL"
    device_name: ClassVar[str] = "GPU"
    limit: ClassVar[int] = LIMIT
    needs: ClassVar[str] = (
        "Each direction between two ranks takes one, each further width of messages there another "
        "one, and so does each group of a collective"
    )
    ways_out: ClassVar[str] = "with passes='-overlap' there is one width only"
    connect_seconds: ClassVar[float | None] = CONNECT_SECONDS
    logs: ClassVar[str] = "that of NCCL with NCCL_DEBUG=INFO"

    def __init__(self, world: World, device: Device | None, library: Library | None) -> None:
        super().__init__(world, device, library)
        self._stuck: list[str] = []
        self._releasing = threading.Lock()
        self._aborting: list[threading.Thread] = []
        self._left: dict[CommunicatorGroup, str | None] = {}
        self._tf32 = False

    def join(self, channels: Iterable[Channel]) -> Lease:
        """Become a member of the communicators that the channels need; collective.

        Each process has a setting that lets products be rounded to TF32. It is no part of the plan,
        but the two ends of an edge must find the same width.
        """
        channels = list(channels)
        if any(channel.background is not None for channel in channels):
            self._tf32 = any(self._world.allgather(may_round_to_tf32()))
        return super().join(channels)

    def group_of(self, channel: Channel) -> CommunicatorGroup:
        """The group of a channel, with the width of its messages."""
        return replace(super().group_of(channel), width=width_of(channel, self._tf32))

    def abort(self) -> None:
        """Break off all operations under way.

        A communicator is not given up while a graph has an operation of it, so graphs go first.
        """
        self._is_broken = True
        self._drop_graphs()
        self.release_device()
        deadline = monotonic() + ABORT_SECONDS
        for thread in self._aborting:
            thread.join(max(deadline - monotonic(), 0.0))
        self._aborting.clear()
        self._stuck += [f"{group}: {why}" for group, why in self._left.items() if why is not None]
        self._left.clear()

    def release_device(self) -> None:
        """Break off all operations under way, and leave it to `abort` to wait for that.

        NCCL first tells its kernels to end; then it waits for graphs to be dropped. All
        communicators end at once: one waits for its operations to leave their streams, where they
        may stand behind those of another one.
        """
        with self._releasing:
            self._is_broken = True
            for group, comm in self._take():
                self._left[group] = f"it takes longer than {ABORT_SECONDS:g} s"
                thread = threading.Thread(target=self._abort, args=(group, comm), daemon=True)
                thread.start()
                self._aborting.append(thread)

    def _abort(self, group: CommunicatorGroup, comm: object) -> None:
        try:
            self.library.abort(comm)
            self._left[group] = None
        except CommunicationError as error:  # it must not hide the failure that has led here
            self._left[group] = str(error)

    def reset(self) -> None:
        """Make all communicators anew after operations were broken off; collective.

        Raises:
            CommunicationError: some rank has not given all of its own up.
        """
        if not self._is_broken:
            return
        stuck_by_rank = enumerate(self._world.allgather(self._stuck))
        reasons = [f"rank {rank}: {why}" for rank, stuck in stuck_by_rank for why in stuck]
        if reasons:
            raise CommunicationError(
                "messages between devices could not be broken off after a failed step "
                f"({'; '.join(reasons)}); start the job again"
            )
        self._is_broken = False
        if self._device is not None:
            self._device.synchronize()
        self._connect(list(self._groups))
