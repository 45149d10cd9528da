"""The NCCL communicators of a process, which can be broken off and made anew."""

from __future__ import annotations

import threading
from time import monotonic
from typing import ClassVar

from ..base import World
from ..device import Device
from ..streams.groups import CommunicatorGroup
from ..streams.library import CommunicationError, Library
from ..streams.pool import Pool

LIMIT = 32
"""Communicators that a rank may be a member of. Each takes some 500 MB of device memory and, while
its operations run, multiprocessors. In a pipeline a rank has four, on 64 ranks as on 3. Where each
of 64 ranks sends to each other one, it would have 126: such a plan is refused. Those of open plans
count together; those that only closed ones have used make room."""

CONNECT_SECONDS = 120.0
"""Seconds that the members of a communicator have to join it. NCCL itself waits for ever."""

ABORT_SECONDS, RESET_SECONDS = 10.0, 60.0
"""Seconds for which a rank that fails waits until its operations are broken off, and, if the job is
to go on, all ranks. Where a host is busy, NCCL takes longer than a rank that ends should wait."""


class NcclPool(Pool):
    """The NCCL communicators of this process; a failure breaks off the operations under way."""

    library_name: ClassVar[str] = "NCCL"
    device_name: ClassVar[str] = "GPU"
    limit: ClassVar[int] = LIMIT
    needs: ClassVar[str] = (
        "Each direction between two ranks takes one, and so does each group of a collective"
    )
    connect_seconds: ClassVar[float | None] = CONNECT_SECONDS
    logs: ClassVar[str] = "that of NCCL with NCCL_DEBUG=INFO"

    def __init__(self, world: World, device: Device | None, library: Library | None) -> None:
        super().__init__(world, device, library)
        self._releasing = threading.Lock()
        self._aborting: list[threading.Thread] = []
        self._left: dict[CommunicatorGroup, str | None] = {}

    def abort(self) -> None:
        """Break off all operations under way.

        A communicator is not given up while a graph has an operation of it, so graphs go first.
        """
        self._is_broken = True
        self._drop_graphs()
        self.release_device()
        self._wait(ABORT_SECONDS)

    def _wait(self, seconds: float) -> None:
        """Wait until all operations are broken off, or for so long."""
        deadline = monotonic() + seconds
        for thread in self._aborting:
            thread.join(max(deadline - monotonic(), 0.0))
        self._aborting = [thread for thread in self._aborting if thread.is_alive()]

    def release_device(self) -> None:
        """Break off all operations under way, and leave it to `abort` to wait for that.

        NCCL first tells its kernels to end; then it waits for graphs to be dropped. All
        communicators end at once: one waits for its operations to leave their streams, where they
        may stand behind those of another one.
        """
        with self._releasing:
            self._is_broken = True
            for group, comm in self._take():
                self._left[group] = f"it takes longer than {RESET_SECONDS:g} s"
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
        self._wait(RESET_SECONDS)
        own = [f"{group}: {why}" for group, why in self._left.items() if why is not None]
        stuck_by_rank = enumerate(self._world.allgather(own))
        reasons = [f"rank {rank}: {why}" for rank, stuck in stuck_by_rank for why in stuck]
        if reasons:
            raise CommunicationError(
                "messages between devices could not be broken off after a failed step "
                f"({'; '.join(reasons)}); start the job again"
            )
        self._is_broken = False
        self._left.clear()
        if self._device is not None:
            self._device.synchronize()
        self._connect(list(self._groups))
