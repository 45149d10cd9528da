"""The virtual world: one process plays every rank, cooperatively, without threads.

It is the debugger and the oracle. Every rank's program is bound as for a world of processes. The
ranks take turns, and each goes on until it has to wait. Communication is as strict as any transport
may be: a message moves only when both sides have come to it, a collective only when its whole group
has, and what arrives shares no storage with what was sent.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from ...ir.ops.module import Module
from ..base import Body
from ..errors import DeadlockError
from ..failures.flight import FlightRecord
from ..program.executor import Executable
from ..program.linked import LinkedModule
from .fabric import VirtualFabric

T = TypeVar("T")


class VirtualWorld:
    """A world of `size` ranks, all played by this process."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a world needs at least one rank, not {size}")
        self._size = size

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    def is_virtual(self) -> bool:
        """Always true."""
        return True

    @property
    def nodes(self) -> Sequence[int]:
        """All ranks are on one machine."""
        return [0] * self._size

    @property
    def device(self) -> None:
        """None: all ranks are on the host."""
        return None

    def plays(self, rank: int) -> bool:
        """True for every rank of the world."""
        return 0 <= rank < self._size

    def broadcast(self, value: T | None, root: int) -> T:
        """`value` itself: this process is the root."""
        if not self.plays(root):
            raise ValueError(f"the world has no rank {root}; its size is {self._size}")
        return value  # type: ignore[return-value] # the root gives a value

    def allgather(self, value: T) -> list[T]:
        """`value` once for each rank."""
        return [value] * self._size

    def barrier(self) -> None:
        """Return: there is nothing to wait for."""

    def end_job(self, message: str) -> None:
        """End this process, which is all there is."""
        raise SystemExit(message)


class VirtualExecutable:
    """All programs of a scheduled module, bound to one fabric.

    Args:
        module: a scheduled module.
        bodies, constants, seed, rank_bodies: as in `LinkedModule`.
        poison: fill a freed slot with NaN (integers: the largest), so that a use after free
            shows.
        shuffle: seed of a random order in which the ranks take turns, in small random numbers of
            instructions; None for round robin. Results must not depend on it.

    Attributes:
        executables: one for each rank, by rank.
    """

    def __init__(
        self,
        module: Module,
        bodies: Mapping[str, Body],
        constants: Mapping[str, Any],
        *,
        seed: int = 0,
        poison: bool = False,
        shuffle: int | None = None,
        rank_bodies: Mapping[int, Mapping[str, Body]] | None = None,
    ) -> None:
        self._module = module
        self._fabric = VirtualFabric(poison)
        self._random = None if shuffle is None else random.Random(shuffle)
        linked = LinkedModule(module, bodies, constants, seed, rank_bodies=rank_bodies or {})
        executables = []
        for rank in range(module.world):
            communicator = self._fabric.communicator(rank)
            serving = dict.fromkeys(module.channels, communicator)
            executables.append(Executable(linked.program(rank, serving)))
        self.executables: tuple[Executable, ...] = tuple(executables)

    def run(
        self,
        inputs: Sequence[Sequence[Any]],
        execution: int | None = None,
        hold: tuple[int, int] | None = None,
    ) -> list[tuple[Any, ...]]:
        """Execute every rank's program once.

        Args:
            inputs: for each rank the values of its program's parameters. A tensor that several
                ranks are given is copied, so that each has its own.
            execution: as in `Executable.start`.
            hold: channel and number of a message that completes only when no rank can go on without
                it, as the slowest possible message does.

        Returns:
            For each rank what its program returns.

        Raises:
            InputError: the inputs do not fit.
            RemoteError: an op or a method raised. The next `run` starts afresh.
            DeadlockError: no rank can move. The next `run` starts afresh.
        """
        self._fabric.traffic.held = hold
        try:
            for executable, values in zip(self.executables, _isolated(inputs), strict=True):
                executable.start(values, execution)
            self._play()
        except BaseException:
            self.reset()
            raise
        return [executable.outputs for executable in self.executables]

    def reset(self) -> None:
        """Give up the execution in progress, with all its messages."""
        self._fabric.reset()
        for executable in self.executables:
            executable.reset()

    def _play(self) -> None:
        """Let the ranks take turns until all have ended.

        Nothing but another rank's step can complete what a rank waits for. So a round in which
        no rank moves is a deadlock, and every deadlock comes to such a round.
        """
        live = list(self.executables)
        while live:
            before = [executable.progress for executable in live]
            ended = {executable for executable in self._order(live) if self._turn(executable)}
            stuck = not ended and before == [executable.progress for executable in live]
            if stuck and not self._fabric.release_held():
                raise self._deadlock()
            live = [executable for executable in live if executable not in ended]

    def _order(self, live: list[Executable]) -> list[Executable]:
        return live if self._random is None else self._random.sample(live, len(live))

    def _turn(self, executable: Executable) -> bool:
        if self._random is None:
            return executable.step()
        return executable.step(self._random.randint(1, 4))

    def _deadlock(self) -> DeadlockError:
        record = FlightRecord(self._module, [e.position() for e in self.executables])
        return DeadlockError(
            f"deadlock: no rank of @{self._module.name} can go on\n{record.describe()}"
        )


def _isolated(inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The inputs, with a copy of each tensor that another rank has been given before."""
    seen: set[int] = set()
    result = []
    for values in inputs:
        ids = {id(value) for value in values}
        result.append(
            [
                value.clone() if isinstance(value, torch.Tensor) and id(value) in seen else value
                for value in values
            ]
        )
        seen |= ids
    return result
