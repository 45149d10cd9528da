"""Runs a compiled step on the ranks that this process plays: all of them, or one under MPI."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from ..backends.base import Body, World
from ..backends.cpu.node import MpiWorld
from ..backends.cpu.transport import CpuTransport
from ..backends.executor import Executable, bind
from ..backends.flight import FlightRecord
from ..backends.plan import check_plan
from ..backends.statistics import Statistics
from ..backends.tracing import Recordable
from ..backends.virtual import VirtualExecutable
from ..ir.module import Module
from .devices import fabrics_of
from .mixed import MixedRuntime, needs_several

Inputs = Callable[[], Sequence[Any]]
"""Gives the values of the step's parameters, checked; raises if the arguments do not fit."""


class Runtime(Protocol):
    """A bound step.

    Attributes:
        executions: the number of the next one, which random numbers depend on.
    """

    executions: int

    def run(self, inputs: Inputs) -> tuple[Any, ...] | None:
        """Execute once on every rank that this process plays.

        Returns:
            What the step returns, or None where this process gets nothing.

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
        self,
        module: Module,
        parameters: Sequence[str],
        bodies: Mapping[str, Body],
        constants: Mapping[str, Any],
        seed: int,
    ) -> None:
        self._executable = VirtualExecutable(module, bodies, constants, seed=seed)
        self._picks = [_pick(module, rank, parameters) for rank in range(module.world)]
        self._reader = _lowest_reader(module)
        self.executions = 0

    def run(self, inputs: Inputs) -> tuple[Any, ...] | None:
        """See `Runtime`."""
        values = inputs()
        execution, self.executions = self.executions, self.executions + 1
        per_rank = [[values[index] for index in pick] for pick in self._picks]
        return self._executable.run(per_rank, execution)[self._reader]

    @property
    def bound(self) -> Mapping[int, Sequence[Recordable]]:
        """See `Runtime`."""
        return {each.rank: [each] for each in self._executable.executables}

    def statistics(self, rank: int) -> Statistics:
        """See `Runtime`."""
        return self._executable.executables[rank].statistics

    def close(self) -> None:
        """See `Runtime`."""


class CpuRuntime:
    """This process's rank of a step, with the other ranks in processes of their own.

    Making one is collective.

    Raises:
        PlanMismatch: the ranks have compiled different plans.
    """

    def __init__(
        self,
        world: MpiWorld,
        module: Module,
        parameters: Sequence[str],
        bodies: Mapping[str, Body],
        constants: Mapping[str, Any],
        seed: int,
        timeout: float | None,
    ) -> None:
        self._plan = int(check_plan(module, world)[:16], 16)
        self._timeout = timeout
        self._transport = transport_of(world)
        self._control = self._transport.control
        self._communicator = self._transport.communicator(world, list(module.channels.values()))
        serving = dict.fromkeys(module.channels, self._communicator)
        program = module.program_of(world.rank)
        self._executable: Executable = bind(program, module, bodies, constants, serving, seed)
        self._progress = (self._communicator.progress,)
        self._pick = _pick(module, world.rank, parameters)
        self._takes_all = self._pick == list(range(len(parameters)))
        self._gets_outputs = bool(program.outputs)
        self.executions = 0
        self._describe = lambda positions: FlightRecord(module, positions).describe()

    def run(self, inputs: Inputs) -> tuple[Any, ...] | None:
        """See `Runtime`. Collective; all ranks return, or all raise the same error."""
        control, executable = self._control, self._executable
        self._transport.recover_if_due()
        execution, self.executions = self.executions, self.executions + 1
        control.begin(self._plan, executable.position, self._describe, self._timeout)
        try:
            values = inputs()
            if not self._takes_all:
                values = [values[index] for index in self._pick]
            outputs = executable.run(values, control.pause, None, execution, checked=True)
            control.commit(self._progress)
        except BaseException as error:
            resets = (executable.reset, self._communicator.reset)
            agreed = self._transport.fail(error, resets)
            if not isinstance(error, Exception):
                raise  # Ctrl-C stays Ctrl-C, whatever else has failed
            raise agreed from error.__cause__
        return outputs if self._gets_outputs else None

    @property
    def bound(self) -> Mapping[int, Sequence[Recordable]]:
        """See `Runtime`."""
        return {self._executable.rank: [self._executable]}

    def statistics(self, rank: int) -> Statistics:
        """See `Runtime`."""
        if rank != self._executable.rank:
            raise ValueError(
                f"this is rank {self._executable.rank}, and it has no statistics of rank {rank}; "
                "cg.allgather() exchanges them"
            )
        return self._executable.statistics

    def close(self) -> None:
        """See `Runtime`."""
        self._communicator.close()


def make_runtime(
    world: World,
    module: Module,
    parameters: Sequence[str],
    bodies: Mapping[str, Body],
    constants: Mapping[str, Any],
    *,
    seed: int,
    timeout: float | None,
) -> Runtime:
    """Bind a scheduled module in `world`; collective.

    Args:
        world: all ranks.
        module: the scheduled step.
        parameters: names of the step's parameters, in the order of its inputs.
        bodies, constants: what the ranks that this process plays run with.
        seed: of all random numbers.
        timeout: seconds that an execution may take; None for no limit.
    """
    if world.is_virtual:
        return VirtualRuntime(module, parameters, bodies, constants, seed)
    if needs_several(module, fabrics_of(world)):
        pick = _pick(module, world.rank, parameters)
        transport = transport_of(world)  # type: ignore[arg-type] # only MPI's is not virtual
        return MixedRuntime(world, transport, module, pick, bodies, constants, seed, timeout)
    return CpuRuntime(world, module, parameters, bodies, constants, seed, timeout)  # type: ignore[arg-type]


_transports: WeakKeyDictionary[World, CpuTransport] = WeakKeyDictionary()


def transport_of(world: MpiWorld) -> CpuTransport:
    """What this process shares with the other ranks of `world`; made once, on all ranks."""
    transport = _transports.get(world)
    if transport is None:
        transport = _transports[world] = CpuTransport(world)
        atexit.register(transport.close)
    return transport


def _pick(module: Module, rank: int, parameters: Sequence[str]) -> list[int]:
    """For each parameter of a rank's program its index among the step's."""
    index = {name: i for i, name in enumerate(parameters)}
    return [index[value.name] for value in module.program_of(rank).params]


def _lowest_reader(module: Module) -> int:
    """The first rank whose program returns something; 0 if none does."""
    readers = (p.rank for p in module.programs if p.outputs and p.rank is not None)
    return min(readers, default=0)
