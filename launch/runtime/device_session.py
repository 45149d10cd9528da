"""The part of a step's runtime that concerns devices.

Objects, and messages of ranks without a device, go by the transport of hosts. Between devices the
host only puts messages on streams: a failure has to break them off, and a watchdog looks whether
they end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from time import monotonic, sleep

from ...backends.base import World
from ...backends.cpu.transport import CpuTransport
from ...backends.devices.programs.executable import DeviceExecutable
from ...backends.devices.programs.watchdog import Watchdog, advice, put_by
from ...backends.errors import TransportError
from ...backends.program.executor import Executable
from ...backends.streams.communicator import StreamCommunicator
from ...ir.attributes import Effect, Stream
from ...ir.ops import Call, Collective, Recv, Value, Wait
from ...ir.ops.module import Module, Program
from ...passes.placement.fabrics import is_by_stream
from ...tracer.checked_ids import forget, noted
from ..world.communicators import faults_of, logs_of
from ..world.fault_hook import say_faults


class DeviceSession:
    """One rank's part of a step that concerns devices: its own, and those of other ranks.

    Args:
        world: all ranks.
        transport: of hosts.
        streams: the communicators that carry messages from device to device.
        executable: this rank's program, on its device if it has one.
        timeout: seconds that an execution may take; None for no limit.

    Attributes:
        watch: called with the number of each execution that has been put on the device; None if
            this rank has no device.
        is_released: whether this execution's messages were broken off ahead of its end here, so
            that what the host has met since comes of that.
    """

    def __init__(
        self,
        world: World,
        transport: CpuTransport,
        streams: Sequence[StreamCommunicator],
        executable: Executable,
        timeout: float | None,
    ) -> None:
        self.watch: Callable[[int], None] | None = None
        self.is_released = False
        self._releasing = Lock()
        self._world = world
        self._transport = transport
        self._streams = streams
        self._executable = executable
        self._timeout = timeout
        self._doubtful = built_on_streams(executable.program, executable.module)
        self._lost: list[str] = []
        self._watchdog: Watchdog | None = None
        device = world.device
        if device is None:
            return
        self._compute = device.stream(Stream.COMPUTE)
        self._ahead = device.event()
        self._watchdog = Watchdog(
            device,
            timeout,
            lambda: faults_of(streams),
            self._give_up,
            lambda: put_by(executable),
            world.end_job,
            lambda: noted(device.torch_device),
            self._on_device.look_after_messages,
            self._release_if_failed_elsewhere,
        )
        say_faults(world.end_job)
        self.watch = partial(self._watchdog.watch, self._on_device.work)
        for communicator in streams:
            communicator.hold(self)

    def begin(self) -> None:
        """Make ready for an execution, once all ranks have recovered from the last one.

        Raises:
            TransportError: the state of an actor is in doubt.
        """
        self._transport.recover_if_due()
        self.is_released = False
        if self._lost:
            raise TransportError(
                "an earlier execution failed while messages were under way between devices; what "
                f"{', '.join(self._lost)} made of the remains may be wrong. Restore the state of "
                "these actors, for example from a checkpoint, and compile the step again"
            )
        if self._watchdog is not None:
            try:
                self._ahead.record(self._compute)
            except RuntimeError as error:
                self.end_if_failed(error)
                raise

    def raise_noted(self) -> None:
        """Raise an error that an earlier execution has noted on the device, without a wait for any.

        Raises:
            IndexError: an index was out of range.
        """
        device = self._world.device
        error = None if device is None else noted(device.torch_device)
        if device is not None and error is not None:
            device.synchronize()
            forget(device.torch_device)
            raise IndexError(error)

    def close(self) -> None:
        """Stop watching, and drop the graphs; idempotent."""
        if self._watchdog is not None:
            self._watchdog.close()
        self.drop_graphs()

    def drop_graphs(self) -> None:
        """Drop the graphs with messages; idempotent."""
        if isinstance(self._executable, DeviceExecutable):
            self._executable.drop_graphs()

    # -- failure ----------------------------------------------------------------------------

    def end_if_failed(self, error: BaseException) -> None:
        """End the job if an error says that this rank's device has failed.

        Nothing can be broken off or begun again on it, and attempts would hide the message behind
        errors of their own.
        """
        if self._watchdog is not None:
            self._watchdog.end_if_failed(error, self._on_device.work)

    def note_failure(self, has_begun: bool) -> None:
        """Note the actors that an execution which has failed may have changed wrongly.

        Args:
            has_begun: whether this rank had begun its program.
        """
        begun = self._executable.begun if has_begun else 0
        self._lost = sorted({actor for at, actor in self._doubtful if at < begun})

    def tell_what_is_lost(self) -> None:
        """Agree on whose state is in doubt, so that all ranks refuse to go on alike."""
        self._lost = sorted({actor for lost in self._world.allgather(self._lost) for actor in lost})

    def break_off(self) -> None:
        """Break off messages that are under way between devices, once work ahead of them has ended.

        A message that has been put on a stream would otherwise wait for its other end for ever.
        """
        try:
            self._end_what_is_ahead()
        finally:  # also if Ctrl-C comes meanwhile: the other ranks break off as well
            with self._releasing:  # a release that has begun is not to meet the next execution
                for communicator in self._streams:
                    communicator.break_off()

    def _release_if_failed_elsewhere(self) -> None:
        """Let the device go on if a rank has failed whose message the host waits for.

        The watchdog calls it where the host does not get on, as when the driver loads a kernel and
        waits for the device first. The host then learns of the failure as it would have otherwise.
        """
        with self._releasing:
            if not self.is_released and self._transport.control.has_failed_elsewhere():
                self.is_released = True
                for communicator in self._streams:
                    communicator.release_device()

    def _end_what_is_ahead(self) -> None:
        """Wait for work that the device had before the failed execution: its messages are whole.

        Every rank has put its part of that work on its device, and its results are in use already.
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

    def _give_up(self, trouble: str) -> None:
        """End the job: the device does not end its work, and the host may wait for it."""
        hosts = self._transport.control.flight_record()
        executable = self._on_device
        self._world.end_job(
            f"{trouble}\nHere is where the host of every rank is in {executable.work.name}; a host "
            "outside of executions has put its last one on its device, and does not wait for that:"
            f"\n{hosts}{advice(logs_of(self._streams))}"
        )

    @property
    def _on_device(self) -> DeviceExecutable:
        assert isinstance(self._executable, DeviceExecutable), "ranks with a device have a watchdog"
        return self._executable


def built_on_streams(program: Program, module: Module) -> list[tuple[int, str]]:
    """The calls that change an actor and may take a value from a stream, as (index, actor)."""
    by_stream = {id_ for id_, channel in module.channels.items() if is_by_stream(channel)}
    awaited: set[Value] = set()
    has_come = False
    calls: list[tuple[int, str]] = []
    for index, op in enumerate(program.ops):
        if isinstance(op, Recv | Collective) and op.chan in by_stream:
            awaited.update(op.results)
        elif isinstance(op, Wait):
            has_come = has_come or op.operands[0] in awaited
        elif isinstance(op, Call) and has_come:
            function = module.functions[op.fn.name]
            if function.actor is not None and function.effect not in (Effect.PURE, Effect.READ):
                actors = (function.actor, *(sharer for sharer, _ in function.shares.effects))
                calls.extend((index, actor) for actor in actors)
    return calls
