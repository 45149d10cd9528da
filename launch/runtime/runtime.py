"""Runs a compiled step on the ranks that this process plays: all of them, or one under MPI."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from ...backends.base import World
from ...backends.cpu.node import MpiWorld
from ...backends.cpu.transport import CpuTransport
from ...backends.program.linked import LinkedModule
from ...backends.timing.statistics import Statistics
from ...backends.timing.tracing import Recordable
from ...backends.virtual.world import VirtualExecutable
from ...ir.module import Module
from ..api.numbering import Numbering
from ..world.comparison import CallFacts
from ..world.devices import fabrics_of
from .device_runtime import DeviceRuntime, needs_several
from .rank_runtime import Inputs, RankRuntime, pick


class Runtime(Protocol):
    """A bound step."""

    def run(self, inputs: Inputs) -> tuple[Any, ...]:
        """Execute once on every rank that this process plays.

        Returns:
            The values that the step returns; none where this process gets nothing.

        Raises:
            RemoteError: a method or an op raised, on any rank. The step can be run again.
            InputError: the arguments do not fit; nothing was sent.
            StepTimeout: the deadline has passed.
            TransportError: a rank has ended.
        """

    @property
    def bound(self) -> Mapping[int, Sequence[Recordable]]:
        """The programs of the ranks that this process plays, for profiles."""

    def statistics(self, rank: int) -> Statistics:
        """What a rank has measured; this process must play it."""

    def close(self) -> None:
        """Give back buffers; idempotent."""


class VirtualRuntime:
    """All ranks of a step, played by this process."""

    def __init__(
        self, linked: LinkedModule, parameters: Sequence[str], numbering: Numbering
    ) -> None:
        module = linked.module
        self._executable = VirtualExecutable(
            module, linked.bodies, linked.constants, seed=linked.seed
        )
        self._picks = [pick(module, rank, parameters) for rank in range(module.world)]
        self._reader = _lowest_reader(module)
        self._numbering = numbering

    def run(self, inputs: Inputs) -> tuple[Any, ...]:
        """See `Runtime`."""
        values = inputs()
        execution, self._numbering.next = self._numbering.next, self._numbering.next + 1
        per_rank = [[values[index] for index in pick] for pick in self._picks]
        return self._executable.run(per_rank, execution)[self._reader]

    @property
    def bound(self) -> Mapping[int, Sequence[Recordable]]:
        """See `Runtime`."""
        return {each.rank: [each] for each in self._executable.executables}

    def statistics(self, rank: int) -> Statistics:
        """See `Runtime`."""
        executables = self._executable.executables
        if not 0 <= rank < len(executables):
            raise ValueError(f"there is no rank {rank}: they are 0..{len(executables) - 1}")
        return executables[rank].statistics

    def close(self) -> None:
        """See `Runtime`."""


def make_runtime(
    world: World,
    linked: LinkedModule,
    parameters: Sequence[str],
    *,
    timeout: float | None,
    numbering: Numbering,
    call: CallFacts | None,
) -> Runtime:
    """Bind a scheduled module in `world`; collective.

    Args:
        world: all ranks.
        linked: the scheduled step, and what the ranks that this process plays run it with.
        parameters: names of the step's parameters, in the order of its inputs.
        timeout: seconds that an execution may take; None for no limit.
        numbering: numbers the executions.
        call: the step, its arguments, and whether ranks compare them; None if it is no step.
    """
    if world.is_virtual:
        return VirtualRuntime(linked, parameters, numbering)
    kind = DeviceRuntime if needs_several(linked.module, fabrics_of(world)) else RankRuntime
    transport = transport_of(world)  # type: ignore[arg-type] # only MPI's is not virtual
    return kind(world, transport, linked, parameters, timeout, numbering, call)


_transports: WeakKeyDictionary[World, CpuTransport] = WeakKeyDictionary()


def transport_of(world: MpiWorld) -> CpuTransport:
    """What this process shares with the other ranks of `world`; made once, on all ranks."""
    transport = _transports.get(world)
    if transport is None:
        transport = _transports[world] = CpuTransport(world)
        atexit.register(transport.close)
        world.observe(transport.control)
        world.at_end(transport.control.is_silent)
    return transport


def tell(world: World, purpose: str) -> None:
    """Say, for the other ranks to read while they wait, what the world's next calls are for."""
    transport = _transports.get(world)
    if transport is not None:
        transport.control.purpose = purpose


def is_in_step(world: MpiWorld) -> bool:
    """Whether this process is executing a step that all ranks run together."""
    transport = _transports.get(world)
    return transport is not None and transport.control.is_running


def _lowest_reader(module: Module) -> int:
    """The first rank whose program returns something; 0 if none does."""
    readers = (p.rank for p in module.programs if p.outputs and p.rank is not None)
    return min(readers, default=0)
