"""The processes of one machine, as one of them sees, wakes and shares memory with the others."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ...base import World
from ...errors import TransportError
from ...failures.flight import Activity, Sight
from ..memory.fences import full_fence, publish_fence
from ..memory.layout import ROW, WAITING, block_bytes
from ..memory.parallel_memcpy import Copier
from ..memory.segments import MemoryFiles, Name, NamedFiles, Segments, share
from .doorbell import Doorbell
from .mpi_module import module_of


class MpiWorld(World, Protocol):
    """A world of processes, with MPI between them if there is more than one machine."""

    @property
    def comm(self) -> Any:
        """The mpi4py communicator over all ranks, or None where there is no MPI."""

    def at_end(self, is_done: Callable[[], bool]) -> None:
        """Call `is_done` until it is true, once the programs of all ranks have ended.

        Only then does MPI end.
        """

    def answer_by(self, teller: Callable[[], Activity | None]) -> None:
        """Let `teller` say what this process does, when another rank asks.

        Another thread calls it. It returns None if the process does nothing that it knows of. The
        answer is that of the last teller that has one.
        """

    def look(self, ranks: Sequence[int], seconds: float) -> Mapping[int, Sight]:
        """Ask other ranks what they do, and wait for `seconds`, and a little more.

        Ranks that cannot be asked, such as those of other machines, are left out.
        """


class MachineNode:
    """The things that a process shares with others of its machine. Making one is collective.

    Attributes:
        world: the ranks that run together.
        rank, size: this process's rank, and the number of ranks.
        local: the ranks on this machine, ascending.
        leader: the first of them.
        leaders: the leader of every machine, ascending.
        pids: process ids by rank; of use on this machine only.
        hosts: names of machines by rank.
        cores: how many cores the processes of this machine may use between them.
        segments: the kind of shared memory that works here.
        block: the control block of this machine (`memory/layout.py`).
        words: the same as words of 8 bytes; row r belongs to rank r.
        fence: a full memory fence.
        order: the fence between a payload and its flag; None where none is needed.
        copier: copies large payloads.
        ring: wakes a local rank.
        bell: wakes and is woken; knows which processes have died.
        comm: this package's own MPI communicator for payloads; None if there is one machine.
    """

    def __init__(self, world: MpiWorld, segments: Sequence[Segments] | None = None) -> None:
        """Meet the other ranks.

        Args:
            world: the ranks that run together.
            segments: kinds of shared memory to try, in this order.

        Raises:
            TransportError: none of the kinds works, or there are several machines and no MPI.
        """
        self.world = world
        self.rank, self.size = world.rank, world.size
        here = world.nodes[self.rank]
        self.local = tuple(rank for rank in range(self.size) if world.nodes[rank] == here)
        self.leader = self.local[0]
        first = {node: rank for rank, node in reversed(list(enumerate(world.nodes)))}
        self.leaders = tuple(sorted(first.values()))
        self.copier = Copier()
        process = (os.getpid(), socket.gethostname(), os.sched_getaffinity(0))
        everyone = world.allgather(process)
        self.pids = [pid for pid, *_ in everyone]
        self.hosts = [host for _, host, _ in everyone]
        self.cores = len(set[int]().union(*(everyone[rank][2] for rank in self.local)))
        self.fence = full_fence()
        self.order = publish_fence(self.fence)
        self.segments, self.block = self._share_block(segments or (MemoryFiles(), NamedFiles()))
        self.words = self.block.cast("Q")
        self._others = [(self.waiting(rank), rank) for rank in self.local if rank != self.rank]
        self.bell = self._hang_bell()
        self.ring = self.bell.ring
        self.comm = self._own_communicator()
        self._next_tag = 0

    @property
    def is_rung(self) -> bool:
        """True if a bell rings for all that this process may wait for.

        Neither other machines nor devices ring one.
        """
        return len(self.leaders) == 1 and self.world.device is None

    def is_local(self, rank: int) -> bool:
        """Return whether `rank` runs on this machine."""
        return self.world.nodes[rank] == self.world.nodes[self.rank]

    def process(self, rank: int) -> str:
        """Name the process of a rank, for a user who looks into it by a debugger."""
        return f"process {self.pids[rank]} on {self.hosts[rank]}"

    def waiting(self, rank: int) -> int:
        """Index of the word that is not 0 while `rank` sleeps.

        After a store that `rank` may wait for: call `fence`, read the word, and call `ring` if it
        is not 0.
        """
        return rank * ROW + WAITING

    def wake_all(self) -> None:
        """Wake every other local rank that sleeps; call it after a store that they may wait for."""
        self.fence()
        self.ring_sleepers()

    def ring_sleepers(self) -> None:
        """Wake every other local rank that is seen to sleep; after a `fence`."""
        words = self.words
        for word, rank in self._others:
            if words[word]:
                self.ring(rank)

    def reserve_tags(self, count: int) -> int:
        """The first of `count` message tags of `comm` that nobody else uses.

        All ranks reserve in the same order.

        Raises:
            TransportError: MPI has no more tags.
        """
        first = self._next_tag
        self._next_tag += count
        if self.comm is not None:
            limit = self.comm.Get_attr(module_of(self.comm).TAG_UB)
            if self._next_tag > limit:
                raise TransportError(
                    f"the compiled steps of this process use more channels between machines than "
                    f"MPI has tags ({limit}); compile fewer steps"
                )
        return first

    def close(self) -> None:
        """Give back what this process holds; idempotent."""
        self.bell.close()

    def _hang_bell(self) -> Doorbell:
        """This process's bell, which rings the others and knows whether they live."""
        bell = Doorbell(self.segments.folder)
        addresses = self.world.allgather(bell.address)
        for rank in self.local:
            if rank != self.rank:
                bell.connect(rank, addresses[rank])
                bell.watch(rank, self.pids[rank])
        self.world.barrier()
        bell.seal()
        return bell

    def _own_communicator(self) -> Any:
        if len(self.leaders) == 1:
            return None
        if self.world.comm is None:
            raise TransportError("ranks on several machines need MPI, and MPI is not started")
        return self.world.comm.Dup()

    def share(
        self,
        own: Mapping[Name, int],
        others: Mapping[Name, tuple[int, int]],
        purpose: str,
    ) -> dict[Name, memoryview]:
        """Create segments, and open those of other ranks (`memory/segments.py`); collective.

        Raises:
            TransportError: a rank has no shared memory for them.
        """
        memory, problems = share(self.world, self.segments, self.pids, own, others)
        for rank, text in problems.items():
            raise TransportError(f"rank {rank} has no shared memory for {purpose}: {text}")
        return memory

    def _share_block(self, kinds: Sequence[Segments]) -> tuple[Segments, memoryview]:
        """Map the control block, by the first kind of memory that works on every rank."""
        nbytes = block_bytes(self.size)
        own = {"": nbytes} if self.rank == self.leader else {}
        others = {} if own else {"": (self.leader, nbytes)}
        problems: dict[int, str] = {}
        for kind in kinds:
            memory, problems = share(self.world, kind, self.pids, own, others)
            if not problems:
                return kind, memory[""]
        reasons = "; ".join(f"rank {rank}: {text}" for rank, text in problems.items())
        raise TransportError(
            f"the processes of a machine cannot share memory: {reasons}. They need /proc of each "
            "other, or a common /dev/shm"
        )
