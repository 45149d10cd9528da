"""Runs this process's rank of a step some of whose values travel from device to device.

Objects, and what concerns ranks without a device, go by the transport of hosts. Between devices the
host only puts messages on streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any

from ...backends.base import World
from ...backends.cpu.transport import CpuTransport
from ...backends.devices.programs.executable import DeviceExecutable
from ...backends.devices.watchdog import Watchdog, advice, cold, put_by
from ...backends.errors import TransportError
from ...backends.failures.flight import FlightRecord
from ...backends.program.executor import Executable
from ...backends.program.linked import LinkedModule, LinkedProgram
from ...ir.attributes import Effect, Stream
from ...ir.module import Module, Program
from ...ir.ops import Call, Collective, Recv, Value, Wait
from ...passes.placement.fabrics import Fabrics, is_by_stream
from ..api.numbering import Numbering
from ..world.communicators import faults_of, logs_of
from ..world.comparison import CallFacts
from .rank_runtime import Inputs, RankRuntime


class DeviceRuntime(RankRuntime):
    """See `RankRuntime`; on a rank with a device the program runs there.

    What `run` returns has been put on the device, and is there for whatever the caller puts on its
    current stream.
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
    ) -> None:
        self._world = world
        self._watchdog: Watchdog | None = None
        super().__init__(world, transport, linked, parameters, timeout, numbering, call)
        self._doubtful = built_on_streams(self._executable.program, self._executable.module)
        self._lost: list[str] = []
        module = self._executable.module
        devices = {r for c in module.channels.values() if is_by_stream(c) for r in c.ranks}
        self._describe = lambda found, sights: FlightRecord(module, found, devices).describe(sights)
        self._recover = self._recover_or_refuse
        if world.device is not None:
            self._compute = world.device.stream(Stream.COMPUTE)
            self._ahead = world.device.event()
            self._watchdog = Watchdog(
                world.device,
                self._timeout,
                self._faults,
                self._give_up,
                lambda: put_by(self._executable),
            )
            for communicator in self._streams:
                communicator.hold(self)

    def run(self, inputs: Inputs) -> tuple[Any, ...]:
        """See `RankRuntime`."""
        if self._watchdog is not None:
            self._ahead.record(self._compute)
        outputs = super().run(inputs)
        if self._watchdog is not None:
            self._watchdog.watch(self._on_device.work, self._executable.execution)
        return outputs

    def close(self) -> None:
        """See `Runtime`."""
        if self._watchdog is not None:
            self._watchdog.close()
        self.drop_graphs()
        super().close()

    def drop_graphs(self) -> None:
        """Forget what was captured of messages; idempotent."""
        if isinstance(self._executable, DeviceExecutable):
            self._executable.drop_graphs()

    def _bind(self, linked: LinkedProgram) -> Executable:
        device = self._world.device
        return Executable(linked) if device is None else DeviceExecutable(linked, device)

    # -- failure ----------------------------------------------------------------------------

    def _give_up(self, trouble: str) -> None:
        """End the job: the device does not end what was put on it, and the host may wait for it."""
        where = self._control.flight_record()
        executable = self._on_device
        self._world.end_job(
            f"{trouble}\nHere is where the host of every rank is in {executable.work.name}; a host "
            "outside of executions has put its last one on its device, and does not wait for that:"
            f"\n{where}{cold(executable.cold)}{advice(logs_of(self._streams))}"
        )

    @property
    def _on_device(self) -> DeviceExecutable:
        assert isinstance(self._executable, DeviceExecutable), "ranks with a device have a watchdog"
        return self._executable

    def _faults(self) -> Sequence[str]:
        return faults_of(self._streams)

    def _fail(self, error: BaseException) -> BaseException:
        """Tell all ranks of a failure, and break off what is under way between devices.

        A message that has been put on a stream would otherwise wait for its other end for ever.
        """
        # Arguments that do not fit are found out before the program begins.
        has_begun = self._executable.execution == self._execution
        begun = self._executable.begun if has_begun else 0
        self._lost = sorted({actor for at, actor in self._doubtful if at < begun})
        agreed = super()._fail(error)
        try:
            self._end_what_is_ahead()
        finally:  # also if Ctrl-C comes meanwhile: the other ranks break off as well
            for communicator in self._streams:
                communicator.break_off()
        return agreed

    def _end_what_is_ahead(self) -> None:
        """Wait for what the device was given before the failed execution: its messages are whole.

        Every rank has put its part of it on its device, and what it returned is in use already.
        """
        if self._watchdog is None:
            return
        deadline = None if self._timeout is None else monotonic() + self._timeout
        while not self._has_ended():
            if deadline is not None and monotonic() > deadline:
                self._give_up(
                    f"an execution of {self._on_device.work.name} has failed, and the device has "
                    f"not ended what was ahead of it within {self._timeout:g} s"
                )
            sleep(0.001)

    def _has_ended(self) -> bool:
        try:
            return self._ahead.query()
        except RuntimeError:
            return True  # the device has failed: it goes on with nothing

    def _resets(self) -> Sequence[Callable[[], None]]:
        return (*super()._resets(), self._tell_what_is_lost)

    def _tell_what_is_lost(self) -> None:
        """Agree on whose state is in doubt, so that all ranks refuse to go on alike."""
        self._lost = sorted({actor for lost in self._world.allgather(self._lost) for actor in lost})

    def _recover_or_refuse(self) -> None:
        self._transport.recover_if_due()
        if self._lost:
            raise TransportError(
                "an earlier execution failed while messages were under way between devices; what "
                f"{', '.join(self._lost)} made of the remains may be wrong. Restore the state of "
                "these actors, for example from a checkpoint, and compile the step again"
            )


def built_on_streams(program: Program, module: Module) -> list[tuple[int, str]]:
    """The calls that change an actor and may take what has come by a stream, as (index, actor)."""
    by_stream = {id_ for id_, channel in module.channels.items() if is_by_stream(channel)}
    awaited: set[Value] = set()
    has_come = False
    found: list[tuple[int, str]] = []
    for index, op in enumerate(program.ops):
        if isinstance(op, Recv | Collective) and op.chan in by_stream:
            awaited.update(op.results)
        elif isinstance(op, Wait):
            has_come = has_come or op.operands[0] in awaited
        elif isinstance(op, Call) and has_come:
            function = module.functions[op.fn.name]
            if function.actor is not None and function.effect not in (Effect.PURE, Effect.READ):
                held = (function.actor, *(other for other, _ in function.shares.effects))
                found.extend((index, actor) for actor in held)
    return found


def needs_several(module: Module, fabrics: Fabrics | None) -> bool:
    """Whether a module needs more than the transport of hosts."""
    return fabrics is not None or any(map(is_by_stream, module.channels.values()))
