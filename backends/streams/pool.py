"""The communicators of a process, made when a plan first needs them and shared by all plans.

There is one for each group of ranks that a plan's channels join: libraries run the operations of
one communicator one after the other, whatever streams they are on. They are kept when plans are
closed, since making them takes long, until there would be too many.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from threading import Lock, Timer
from time import monotonic, sleep
from typing import Any, ClassVar, Protocol
from weakref import WeakSet

import torch

from ...ir.attributes import Stream
from ...ir.ops.module import Channel
from ..base import World
from ..device import Device, DeviceQueue
from ..errors import BindError
from .groups import CommunicatorGroup, Lease, Line
from .library import CommunicationError, Library

IN_USE_SECONDS = 1.0
"""Seconds to wait for a call of the library before its communicator is given up all the same: the
call may be what waits for the device, or Ctrl-C has ended it halfway."""

FLOAT_BYTES = 4


class Holder(Protocol):
    """An owner of graphs that may hold operations of communicators."""

    def drop_graphs(self) -> None:
        """Drop all graphs, also one that is being replayed; idempotent."""


class Pool(ABC):
    """The communicators of this process; a subclass has the facts of one library.

    Watchdogs ask for errors by threads of their own. A communicator is asked and is taken out of
    its line under one lock, and only those that have been taken out are given up. So no watchdog
    asks a communicator that is being given up, or does not exist any more.

    Args:
        world: all ranks.
        device: of this rank; None if it has none, so that it is a member of no communicator.
        library: None with `device`.

    Attributes:
        library_name: in messages.
        device_name: of the devices that it joins, in messages.
        limit: communicators that a rank may be a member of.
        needs: which messages take a communicator, in words.
        connect_seconds: the time for the members of a communicator to join it; None if the
            library has a limit of its own.
        logs: the name of the log that says more about ranks that are not joined.
    """

    library_name: ClassVar[str]
    device_name: ClassVar[str]
    limit: ClassVar[int]
    needs: ClassVar[str]
    connect_seconds: ClassVar[float | None]
    logs: ClassVar[str]

    def __init__(self, world: World, device: Device | None, library: Library | None) -> None:
        self._is_broken = False
        self._using = Lock()
        self._world = world
        self._device = device
        self._library = library
        self._groups: dict[CommunicatorGroup, Line | None] = {}
        self._leases: dict[Lease, None] = {}
        self._holders: WeakSet[Holder] = WeakSet()

    @property
    def device(self) -> Device:
        """The device of this rank, which must have one."""
        assert self._device is not None, "only ranks with a device send by it"
        return self._device

    @property
    def library(self) -> Library:
        """This rank must have a device."""
        assert self._library is not None, "only ranks with a device send by it"
        return self._library

    def group_of(self, channel: Channel) -> CommunicatorGroup:
        """The group of a channel: for an edge, its two ends alone."""
        return CommunicatorGroup(channel.ranks, channel.collective, traffic=channel.traffic)

    def handle(self, queue: DeviceQueue) -> Any:
        """A stream as the library's calls take it."""
        return self.device.raw(queue)

    @abstractmethod
    def abort(self) -> None:
        """Break off all operations under way, if the library can do that."""

    @abstractmethod
    def release_device(self) -> None:
        """Let the device go on where it waits for a rank that has failed, if the library can.

        For any thread, while the host is in a call that waits for the device: as when a kernel is
        loaded, which happens once the device has nothing to do. The host calls `abort` later.
        """

    @abstractmethod
    def reset(self) -> None:
        """Become ready for further operations after operations were broken off; collective.

        Raises:
            CommunicationError: the library cannot; the job has to end.
        """

    def join(self, channels: Iterable[Channel]) -> Lease:
        """Become a member of the communicators that the channels need; collective.

        Returns:
            The lease, to be given to `leave` when it is not used any more.

        Raises:
            BindError: some rank would be a member of too many, with those of open plans.
            CommunicationError: one cannot be joined.
        """
        if self._is_broken:
            self.reset()
        channels = list(channels)
        groups = dict.fromkeys(map(self.group_of, channels))
        self._check_devices([group for group in groups if group not in self._groups])
        self._make_room(groups)
        self._connect([group for group in groups if group not in self._groups])
        lines = ((channel.id, self._groups[self.group_of(channel)]) for channel in channels)
        lease = Lease({id_: line for id_, line in lines if line is not None})
        self._leases[lease] = None
        return lease

    def leave(self, lease: Lease) -> None:
        """End the lease of a closed plan, whose graphs have been dropped; idempotent.

        Its communicators stay until another plan needs their room.
        """
        self._leases.pop(lease, None)

    def hold(self, holder: Holder) -> None:
        """Let `holder` drop its graphs before communicators are given up."""
        self._holders.add(holder)

    def errors(self) -> list[str]:
        """The failures that the library reports, with the ranks they concern; for any thread.

        There are none while ranks recover from a failure: the other ranks break off as well, which
        the library would report.

        Raises:
            CommunicationError: the library does not report.
        """
        failures: list[str] = []
        if self._is_broken:
            return failures
        for line in self._lines():
            if not self._using.acquire(blocking=False):
                return failures  # the host is in a call of the library, which may wait
            try:
                error = None if line.comm is None else self.library.error(line.comm)
            finally:
                self._using.release()
            if error is not None:
                failures.append(f"{line.group}: {error}")
        return failures

    def close(self) -> None:
        """Give all communicators up, once the device is idle; idempotent."""
        if self._lines():
            self.device.synchronize()
        self._drop_graphs()
        self._give_up(tuple(self._groups))

    def _drop_graphs(self) -> None:
        for holder in self._holders:
            holder.drop_graphs()

    # -- joining ----------------------------------------------------------------------------

    def _lines(self) -> list[Line]:
        lines = tuple(self._groups.values())  # at once: groups may be added by another thread
        return [line for line in lines if line is not None and line.comm is not None]

    def _take(self) -> list[tuple[CommunicatorGroup, Any]]:
        """All communicators, out of their lines, to be given up."""
        communicators = []
        with self._unused():
            for line in self._lines():
                communicators.append((line.group, line.comm))
                line.comm = None
        return communicators

    @contextmanager
    def _unused(self) -> Iterator[None]:
        """Wait until no call uses a communicator, but not for long: it may be what waits."""
        is_held = self._using.acquire(timeout=IN_USE_SECONDS)
        try:
            yield
        finally:
            if is_held:
                self._using.release()

    def _check_devices(self, new: Sequence[CommunicatorGroup]) -> None:
        if not new:
            return
        bare = {
            r for r, has in enumerate(self._world.allgather(self._device is not None)) if not has
        }
        for group in new:
            lacking = sorted(bare.intersection(group.ranks))
            if lacking:
                raise BindError(
                    f"{self.library_name} is to serve {group}, but rank {lacking[0]} has no "
                    f"{self.device_name}; leave the choice to cg, or use cg.via(x, 'cpu')"
                )

    # -- room -------------------------------------------------------------------------------

    def _make_room(self, groups: Mapping[CommunicatorGroup, None]) -> None:
        """Give up communicators that no open plan uses, if a rank would be in too many; collective.

        All ranks know of all groups, so each finds out by itself if there is room. A plan may be
        closed at another time on each rank, so ranks tell each other which ones are in use.
        """
        if _fullest((*self._groups, *groups))[1] <= self.limit:
            return
        steps: dict[CommunicatorGroup, dict[str, None]] = {}
        for step, group in chain.from_iterable(self._world.allgather(self._in_use())):
            steps.setdefault(group, {})[step] = None
        rank, count = _fullest((*steps, *groups))
        if count > self.limit:
            raise BindError(self._too_many(rank, count, groups, steps))
        self._give_up([group for group in self._groups if group not in {*steps, *groups}])

    def _in_use(self) -> list[tuple[str, CommunicatorGroup]]:
        """The groups that open plans use on this rank, each with the plan's step."""
        return [(lease.step, group) for lease in self._leases for group in lease.groups]

    def _too_many(
        self,
        rank: int,
        count: int,
        groups: Mapping[CommunicatorGroup, None],
        steps: Mapping[CommunicatorGroup, Mapping[str, None]],
    ) -> str:
        """Say why a plan is refused; `steps` has the open steps that use each group."""
        own_count = sum(rank in group.ranks for group in groups)
        by_step = Counter(
            step
            for group, names in steps.items()
            if rank in group.ranks and group not in groups
            for step in names
        )
        listing = ", ".join(
            f"'{name}': {by_step[name]}" if name else str(by_step[name]) for name in by_step
        )
        held_text = f", and open ones hold {count - own_count} more ({listing})" if by_step else ""
        close = "Close steps that are not needed any more; let" if by_step else "Let"
        return (
            f"rank {rank} would be a member of {count} {self.library_name} communicators, and "
            f"{self.limit} is the most: this step needs {own_count}{held_text}. {self.needs}. "
            f"{close} values that are rarely sent take another way, by cg.via(x, 'cpu'); "
            "have collectives over fewer groups"
        )

    def _give_up(self, groups: Sequence[CommunicatorGroup]) -> None:
        """Destroy communicators, on all ranks in the same order, once the device is idle.

        No graph may have operations of them: a plan drops its graphs before it is closed.
        """
        lines = [line for line in map(self._groups.pop, groups) if line is not None]
        with self._unused():
            comms = [line.comm for line in lines if line.comm is not None]
            for line in lines:
                line.comm = None
        if comms:
            self.device.synchronize()
        for comm in comms:
            self.library.destroy(comm)

    # -- connecting -------------------------------------------------------------------------

    def _connect(self, groups: Sequence[CommunicatorGroup]) -> None:
        if not groups:
            return
        rank = self._world.rank
        keys: dict[CommunicatorGroup, bytes] = {}
        for rank_keys in self._world.allgather(self._make_keys(groups)):
            keys.update(rank_keys)
        for group in groups:  # in the same order on all ranks, so that none waits in a circle
            line = self._groups.get(group)
            if line is None and rank in group.ranks:
                line = Line(group, group.ranks.index(rank), self._using)
            if line is not None:
                line.comm = self._joined(group, keys[group], line.member)
            self._groups[group] = line
        lines = [line for group in groups if (line := self._groups[group]) is not None]
        with self._ending_job_unless(f"carried the first messages of {_listed(lines)}"):
            self._warm(lines)

    def _make_keys(self, groups: Sequence[CommunicatorGroup]) -> dict[CommunicatorGroup, bytes]:
        first = (group for group in groups if group.ranks[0] == self._world.rank)
        return {group: self.library.unique_id() for group in first}

    def _joined(self, group: CommunicatorGroup, key: bytes, member: int) -> Any:
        library, seconds = self.library, self.connect_seconds
        with self._ending_job_unless(f"joined {group}"):
            try:
                comm = library.connect(len(group.ranks), key, member)
            except CommunicationError as error:
                raise CommunicationError(f"{group}: {error}") from error
        deadline = None if seconds is None else monotonic() + seconds
        while not library.is_ready(comm):
            if deadline is not None and monotonic() > deadline:
                library.abort(comm)
                raise CommunicationError(self._overdue(f"joined {group}"))
            sleep(0.001)
        return comm

    def _overdue(self, work: str) -> str:
        return (
            f"{self.library.name} has not {work} within {self.connect_seconds:g} s; look at the "
            f"other ranks' output, and at {self.logs}"
        )

    @contextmanager
    def _ending_job_unless(self, work: str) -> Iterator[None]:
        """End the job if the block takes too long, since a blocking call has no other end.

        Args:
            work: of the block, in words, as `joined rank 1`.
        """
        if self.connect_seconds is None:
            yield
            return
        timer = Timer(self.connect_seconds, lambda: self._world.end_job(self._overdue(work)))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _warm(self, lines: Sequence[Line]) -> None:
        """Send a number over each line: the first use connects, and takes memory."""
        if not lines:
            return
        members = max(len(line.group.ranks) for line in lines)
        source, target = torch.zeros(2, members, device=self.device.torch_device)
        self.device.synchronize()
        for line in lines:
            if line.group.collective:
                stream = self._stream(Stream.COLLECTIVE)
                at = source.data_ptr(), target.data_ptr()
                with line as comm:
                    self.library.all_gather(*at, FLOAT_BYTES, comm, stream)
            else:
                self._warm_edge(line, source.data_ptr(), target.data_ptr())
        self.device.synchronize()

    def _warm_edge(self, line: Line, source: int, target: int) -> None:
        """Send a number over the line of two ranks; `source` and `target` are pointers to it."""
        if line.member == 0:
            stream = self._stream(Stream.SEND)
            with line as comm:
                self.library.send(source, FLOAT_BYTES, line.peer, comm, stream)
        else:
            stream = self._stream(Stream.RECV)
            with line as comm:
                self.library.recv(target, FLOAT_BYTES, line.peer, comm, stream)

    def _stream(self, kind: Stream) -> Any:
        return self.handle(self.device.stream(kind))


def _fullest(groups: Iterable[CommunicatorGroup]) -> tuple[int, int]:
    """The rank that is in the most groups, each counted once, and their number."""
    counts = Counter(rank for group in dict.fromkeys(groups) for rank in group.ranks)
    return max(counts.items(), key=lambda item: item[1], default=(0, 0))


def _listed(lines: Iterable[Line]) -> str:
    return ", ".join(str(line.group) for line in lines)
