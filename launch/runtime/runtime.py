"""Run a compiled step on the ranks that this process plays: all of them, or one under MPI."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

from ...backends.agreement.plan_hash import check_plan
from ...backends.base import World
from ...backends.cpu.transport import CpuTransport
from ...backends.devices.programs.executable import DeviceExecutable
from ...backends.failures.flight import FlightRecord
from ...backends.per_world import PerWorld
from ...backends.program.executor import Executable
from ...backends.program.linked import LinkedModule
from ...backends.program.tracing import Recordable
from ...backends.timing.statistics import Statistics
from ...backends.virtual.world import VirtualExecutable
from ...ir.ops.module import Module
from ...passes.placement.fabrics import is_by_stream
from ..environment.config import config
from ..job.failure import say_departure
from ..world.bootstrap import registry_of
from ..world.communicators import connect_channels
from ..world.comparison import CallFacts
from ..world.devices import fabrics_of
from ..world.mpi_world import MpiWorld
from .device_session import DeviceSession
from .numbering import Numbering

Inputs = Callable[[], Sequence[Any]]
"""Gives the values of the step's parameters, checked; raises if the arguments do not fit."""


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
        """The measurements of a rank, which this process must play."""

    def close(self) -> None:
        """Give back buffers; idempotent."""


class VirtualRuntime(Runtime):
    """All ranks of a step, played by this process."""

    def __init__(
        self,
        linked: LinkedModule,
        parameters: Sequence[str],
        numbering: Numbering,
        mark: memoryview,
    ) -> None:
        module = linked.module
        self._executable = VirtualExecutable(
            module,
            linked.bodies,
            linked.constants,
            seed=linked.seed,
            rank_bodies=linked.rank_bodies,
        )
        self._picks = [pick(module, rank, parameters) for rank in range(module.world)]
        self._reader = _lowest_reader(module)
        self._numbering = numbering
        self._mark = mark

    def run(self, inputs: Inputs) -> tuple[Any, ...]:
        values = inputs()
        execution, self._numbering.next = self._numbering.next, self._numbering.next + 1
        self._mark[0] = execution + 1
        per_rank = [[values[index] for index in pick] for pick in self._picks]
        return self._executable.run(per_rank, execution)[self._reader]

    @property
    def bound(self) -> Mapping[int, Sequence[Recordable]]:
        return {executable.rank: [executable] for executable in self._executable.executables}

    def statistics(self, rank: int) -> Statistics:
        executables = self._executable.executables
        if not 0 <= rank < len(executables):
            raise ValueError(f"there is no rank {rank}: they are 0..{len(executables) - 1}")
        return executables[rank].statistics

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


class RankRuntime(Runtime):
    """This process's rank of a step, with the other ranks in processes of their own.

    Making one is collective. The transport of hosts begins and ends executions on all ranks
    together, whatever carries their messages. On a rank with a device the program runs there, and
    whatever the caller puts on its current stream can use the results of `run`.

    Args:
        world: all ranks, one for each process.
        transport: of hosts.
        linked, parameters, timeout, numbering, call: as `make_runtime` takes them.
        mark: the number of executions that this rank has begun, as `mark_of` makes it.

    Raises:
        PlanMismatch: the ranks have compiled different plans.
        UnknownCommunicator: the step names a transport that nobody has registered.
        BindError: a transport cannot carry a channel's messages.
    """

    def __init__(
        self,
        world: World,
        transport: CpuTransport,
        linked: LinkedModule,
        parameters: Sequence[str],
        timeout: float | None,
        numbering: Numbering,
        call: CallFacts | None,
        mark: memoryview,
    ) -> None:
        module = linked.module
        self._world = world
        self._numbering = numbering
        self._mark = mark
        self._plan = int(check_plan(module, world)[:16], 16)
        self._timeout = timeout
        self._transport = transport
        self._control = transport.control
        channels = list(module.channels.values())
        connected = connect_channels(world, transport, channels, module.name)
        self._communicators = connected.communicators
        self._session: DeviceSession | None = None
        device = world.device
        self._executable: Executable
        try:
            program = linked.program(world.rank, connected.serving)
            if device is None:
                self._executable = Executable(program)
            else:
                self._executable = DeviceExecutable(program, device)
        except BaseException:
            self.close()  # nobody else will
            raise
        self._begin: Callable[[], object] = transport.recover_if_due
        by_stream = [channel for channel in channels if is_by_stream(channel)]
        if fabrics_of(world) is not None or by_stream:
            session = DeviceSession(world, transport, connected.streams, self._executable, timeout)
            self._session, self._begin = session, session.begin
        devices = {rank for channel in by_stream for rank in channel.ranks}
        self._record = lambda positions: FlightRecord(module, positions, devices)
        self._progress = tuple(communicator.progress for communicator in self._communicators)
        self._pick = pick(module, world.rank, parameters)
        self._takes_all = self._pick == list(range(len(parameters)))
        self._doing = f"a call of {module.name if call is None else call.words}"
        comparison = None if call is None else call.comparison
        self._compare = comparison and comparison(world, self._control, self._progress)
        self._until_compared = 0 if self._compare is None else 1

    def run(self, inputs: Inputs) -> tuple[Any, ...]:
        """Execute once; collective. All ranks return, or all raise the same error."""
        control, executable, session = self._control, self._executable, self._session
        self._begin()
        numbering = self._numbering
        execution = numbering.next
        self._mark[0] = execution + 1
        self._until_compared -= 1
        compare = None if self._until_compared else self._compare
        if compare is not None:
            self._until_compared = compare.plan_next()  # whatever comes of this execution
        control.begin(self._plan, executable.position, self._record, self._timeout, self._doing)
        try:
            if session is not None:
                session.raise_noted()
            values = inputs()
            if compare is not None:
                compare.compare(values)
            if not self._takes_all:
                values = [values[index] for index in self._pick]
            numbering.next = execution + 1
            outputs = executable.run(values, control.pause, execution, checked=True)
            control.commit(self._progress)
        except BaseException as error:
            if session is not None:
                session.end_if_failed(error)
            say_departure(error)  # before other ranks know of it, and may end the job
            agreed = self._fail(error, execution)
            if not isinstance(error, Exception):
                raise  # Ctrl-C stays Ctrl-C, whatever else has failed
            raise agreed from error.__cause__
        if session is not None and session.watch is not None:
            session.watch(execution)
        return outputs

    @property
    def bound(self) -> Mapping[int, Sequence[Recordable]]:
        return {self._executable.rank: [self._executable]}

    def statistics(self, rank: int) -> Statistics:
        if rank != self._executable.rank:
            raise ValueError(
                f"this is rank {self._executable.rank}, and it has no statistics of rank {rank}; "
                "cg.allgather() exchanges them"
            )
        return self._executable.statistics

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        for communicator in self._communicators:
            communicator.close()

    def _fail(self, error: BaseException, execution: int) -> BaseException:
        """Tell all ranks of a failure; returns the error that all of them raise.

        The execution counts unless a rank has refused it, before its program began: where one
        process plays all ranks, nothing runs then. So the ranks count alike, whether their own
        programs had begun or not.
        """
        numbering, session = self._numbering, self._session
        has_begun = numbering.next > execution
        resets = [
            self._executable.reset,
            *(communicator.reset for communicator in self._communicators),
        ]
        resets.append(self._agree_on_number)
        if session is not None:
            session.note_failure(has_begun)
            resets.append(session.tell_what_is_lost)
        is_released = session is not None and session.is_released
        agreed = self._transport.fail(None if is_released else error, not has_begun, resets)
        numbering.next = execution if self._control.refused else execution + 1
        if session is not None:
            session.break_off()
        return agreed

    def _agree_on_number(self) -> None:
        """Count as the others do, before the next execution.

        A rank that waited long enough for another has raised without knowing whether that one
        would refuse the execution.
        """
        self._numbering.next = max(self._world.allgather(self._numbering.next))


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
    mark = mark_of(world, linked.module.name)
    if world.is_virtual:
        return VirtualRuntime(linked, parameters, numbering, mark)
    transport = transport_of(world)
    return RankRuntime(world, transport, linked, parameters, timeout, numbering, call, mark)


def mark_of(world: World, step: str) -> memoryview:
    """Make the mark by which the launcher knows how far this process has come in a step.

    Returns:
        One integer, for the number of executions that have begun; if no launcher asks, nobody reads
        it.
    """
    registry = registry_of(config())
    mark = None if registry is None else registry.mark(world.rank, step)
    return memoryview(bytearray(8)).cast("Q") if mark is None else mark


transports: PerWorld[CpuTransport] = PerWorld()
"""The transport of this process to the other ranks of a world, once there is one."""


def transport_of(world: World) -> CpuTransport:
    """The transport of this process to the other ranks of `world`; made once, on all ranks."""
    return transports.of(world, partial(_make_transport, world))


def _make_transport(world: World) -> CpuTransport:
    assert not world.is_virtual, "no process plays several ranks"
    own = cast(MpiWorld, world)
    transport = CpuTransport(own)
    atexit.register(transport.close)
    own.observe(transport.control)
    own.at_end(transport.control.is_silent)
    return transport


def tell(world: World, purpose: str) -> None:
    """Tell the purpose of the world's next calls; the other ranks read it while they wait."""
    transport = transports.get(world)
    if transport is not None:
        transport.control.purpose = purpose


def is_in_step(world: World) -> bool:
    """True if this process is executing a step that all ranks run together.

    Never true of a virtual world, where one process comes to a step on all ranks.
    """
    transport = transports.get(world)
    return transport is not None and transport.control.is_running


def _lowest_reader(module: Module) -> int:
    """The first rank whose program returns something; 0 if none does."""
    readers = (p.rank for p in module.programs if p.outputs and p.rank is not None)
    return min(readers, default=0)


def pick(module: Module, rank: int, parameters: Sequence[str]) -> list[int]:
    """The index in the step's parameters of each parameter of a rank's program."""
    index = {name: i for i, name in enumerate(parameters)}
    return [index[value.name] for value in module.program_of(rank).params]
