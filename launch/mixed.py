"""Runs this process's rank of a step whose values travel by several transports.

That is so where ranks have devices, and where the step says `cg.via`. Objects, and what concerns
ranks without a device, go by the transport of hosts, which also begins and ends executions on all
ranks together. Between devices the host only puts messages on streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..backends.base import Body, Communicator, Pause, World
from ..backends.cpu.transport import CpuTransport
from ..backends.devices.executable import DeviceExecutable
from ..backends.devices.watchdog import Watchdog
from ..backends.errors import TransportError
from ..backends.executor import Executable, bind
from ..backends.flight import FlightRecord
from ..backends.hccl.communicator import HcclCommunicator
from ..backends.hccl.communicator import connect as connect_by_hccl
from ..backends.nccl.communicator import connect
from ..backends.plan import check_plan
from ..backends.registry import create, register
from ..backends.statistics import Statistics
from ..backends.tracing import Recordable
from ..ir.attributes import Effect
from ..ir.module import Channel, Module, Program
from ..ir.ops import Call, Collective, Recv, Value, Wait
from ..passes.fabrics import Fabrics
from .config import config

HOST_NAMES = (None, "cpu", "mpi")
"""What the transport of hosts is called in a channel's `via`."""


def _connect_by_hccl(world: World, channels: Sequence[Channel]) -> HcclCommunicator:
    return connect_by_hccl(world, channels, config().hccl_library)


register("nccl", connect)
register("hccl", _connect_by_hccl)

Inputs = Callable[[], Sequence[Any]]


class MixedRuntime:
    """See `Runtime`. Making one is collective.

    Args:
        world: all ranks, one for each process.
        transport: of hosts.
        pick: for each parameter of this rank's program its index among the step's.

    Raises:
        PlanMismatch: the ranks have compiled different plans.
        UnknownCommunicator: the step names a transport that nobody has registered.
        BindError: a transport cannot carry what it is to carry.
    """

    def __init__(
        self,
        world: World,
        transport: CpuTransport,
        module: Module,
        pick: Sequence[int],
        bodies: Mapping[str, Body],
        constants: Mapping[str, Any],
        seed: int,
        timeout: float | None,
    ) -> None:
        self.executions = 0
        self._plan = int(check_plan(module, world)[:16], 16)
        self._world = world
        self._timeout = timeout
        self._transport = transport
        self._control = transport.control
        self._pick = list(pick)
        self._communicators, serving = _serve(world, transport, module)
        self._progress = tuple(each.progress for each in self._communicators.values())
        program = module.program_of(world.rank)
        device = world.device
        self._executable: Executable
        self._watchdog: Watchdog | None = None
        if device is None:
            self._executable = bind(program, module, bodies, constants, serving, seed)
        else:
            self._executable = DeviceExecutable(
                program, module, bodies, constants, serving, seed, device
            )
            self._watchdog = Watchdog(device, timeout, self._faults, self._give_up)
            for communicator in self._communicators.values():
                hold = getattr(communicator, "hold", None)
                if hold is not None:
                    hold(self._executable)
        self._doubtful = _built_on_streams(program, module)
        self._lost: list[str] = []
        self._gets_outputs = bool(program.outputs)
        self._describe = lambda positions: FlightRecord(module, positions).describe()

    def run(self, inputs: Inputs) -> tuple[Any, ...] | None:
        """See `Runtime`. Collective; all ranks return, or all raise the same error.

        What is returned has been put on the device, and is there for whatever the caller puts on
        its current stream.
        """
        self._transport.recover_if_due()
        self._refuse_if_lost()
        control, executable = self._control, self._executable
        execution, self.executions = self.executions, self.executions + 1
        control.begin(self._plan, executable.position, self._describe, self._timeout)
        pause: Pause = control.pause
        try:
            given = inputs()
            values = [given[index] for index in self._pick]
            outputs = executable.run(values, pause, None, execution, checked=True)
            control.commit(self._progress)
        except Exception as error:
            raise self._broken_off(error) from error.__cause__
        if self._watchdog is not None:
            self._watchdog.watch(execution)
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
        if self._watchdog is not None:
            self._watchdog.close()
        if isinstance(self._executable, DeviceExecutable):
            self._executable.drop_graphs()
        for communicator in self._communicators.values():
            communicator.close()

    # -- failure ----------------------------------------------------------------------------

    def _give_up(self, trouble: str) -> None:
        """End the job: the device does not end what was put on it, and the host may wait for it."""
        where = self._control.flight_record()
        end = getattr(self._world, "end_job", None)
        assert end is not None, "ranks with devices are processes of a job"
        end(f"{trouble}. Here is where every rank is:\n{where}")

    def _faults(self) -> Sequence[str]:
        return [
            fault
            for communicator in self._communicators.values()
            for fault in getattr(communicator, "faults", tuple)()
        ]

    def _broken_off(self, error: BaseException) -> BaseException:
        """Tell all ranks of a failure, and break off what is under way between devices.

        A message that has been put on a stream would otherwise wait for its other end for ever.
        """
        begun = self._executable.begun
        resets = (
            self._executable.reset,
            *(each.reset for each in self._communicators.values()),
            self._tell_what_is_lost,
        )
        self._lost = sorted({actor for at, actor in self._doubtful if at < begun})
        agreed = self._transport.fail(error, resets)
        for communicator in self._communicators.values():
            break_off = getattr(communicator, "break_off", None)
            if break_off is not None:
                break_off()
        return agreed

    def _tell_what_is_lost(self) -> None:
        """Agree on whose state is in doubt, so that all ranks refuse to go on alike."""
        self._lost = sorted({actor for lost in self._world.allgather(self._lost) for actor in lost})

    def _refuse_if_lost(self) -> None:
        if self._lost:
            raise TransportError(
                "an earlier execution failed while messages were under way between devices; what "
                f"{', '.join(self._lost)} made of the remains may be wrong. Restore the state of "
                "these actors, for example from a checkpoint, and compile the step again"
            )


def _serve(
    world: World, transport: CpuTransport, module: Module
) -> tuple[dict[str, Communicator], dict[int, Communicator]]:
    """The communicators by name, made in one order on all ranks, and which serves each channel."""
    by_name: dict[str, list[Channel]] = {"cpu": []}
    for channel in module.channels.values():
        name = "cpu" if channel.via in HOST_NAMES else str(channel.via)
        by_name.setdefault(name, []).append(channel)
    made: dict[str, Communicator] = {}
    serving: dict[int, Communicator] = {}
    for name in sorted(by_name):
        channels = by_name[name]
        if name == "cpu":
            made[name] = transport.communicator(world, channels)
        else:
            made[name] = create(name, world, channels)
        serving.update(dict.fromkeys((channel.id for channel in channels), made[name]))
    return made, serving


def _built_on_streams(program: Program, module: Module) -> list[tuple[int, str]]:
    """The calls that change an actor and may take what has come by a stream, as (index, actor)."""
    by_stream = {id_ for id_, channel in module.channels.items() if channel.via not in HOST_NAMES}
    awaited: set[Value] = set()
    has_come = False
    found = []
    for index, op in enumerate(program.ops):
        if isinstance(op, Recv | Collective) and op.chan in by_stream:
            awaited.update(op.results)
        elif isinstance(op, Wait):
            has_come = has_come or op.operands[0] in awaited
        elif isinstance(op, Call) and has_come:
            function = module.functions[op.fn.name]
            if function.actor is not None and function.effect not in (Effect.PURE, Effect.READ):
                found.append((index, function.actor))
    return found


def needs_several(module: Module, fabrics: Fabrics | None) -> bool:
    """Whether a module needs more than the transport of hosts."""
    return fabrics is not None or any(c.via not in HOST_NAMES for c in module.channels.values())
