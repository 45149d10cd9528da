"""Instances of a driven graph on a rank with a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from ....ir.attributes import Stream
from ...base import Pause, Port
from ...device import Device, Event
from ...driven.arrange import Reports, last_op, post_reports, take_report
from ...driven.error_propagation import ErrorPropagation
from ...driven.instance import Guard, Instance
from ...errors import TransportError
from ...poison import Poison
from ...program.code import Code
from ...program.engine import Engine, Owner
from ...program.instruction_info import KEEP, InstructionInfo, Role
from ...program.instructions import Instruction
from ...program.linked import LinkedProgram
from ...program.tracing import ProgramLog
from ...timing.statistics import Statistics
from ...timing.tallies import Tally
from ..output_buffers import LentTensor
from .binder import DeviceBinder
from .capture import CapturedSegment
from .device_only import DeviceOnlyBinder
from .driven import DrivenBinder
from .interleave import interleave
from .pending_work import PendingWork
from .watchdog import Watchdog

Shared = tuple[Statistics, Sequence[Guard], Reports | None]
"""The statistics, guards and reports that `Instance` takes."""


def hand_over(device: Device, tensors: Sequence[Tensor], loans: Sequence[LentTensor]) -> None:
    """Inside a session: let the caller's stream use a result, some of it in a graph's memory."""
    device.keep(tensors, device.caller())
    for loan in loans:
        loan.hand_to_caller(device)


class SessionEngine(Engine):
    """An engine that runs inside a session of the device; see `Engine`.

    It opens a session only if there is something to put on the device.

    Args:
        device: of this rank.
        polls: for instructions that wait, functions that tell without the device whether they can
            go on.

    Attributes:
        is_put: whether all of the execution is on the device, so that the rest needs no session.
    """

    def __init__(
        self,
        linked: LinkedProgram,
        code: Code,
        tally: Tally,
        runs_without_grad: bool,
        *,
        device: Device,
        polls: Mapping[Instruction | None, Callable[[], bool]],
    ) -> None:
        super().__init__(linked, code, tally, runs_without_grad)
        self.is_put = False
        self._device = device
        self._polls = polls

    def advance(self, owner: Owner, limit: int | None = None, pause: Pause | None = None) -> bool:
        if self.is_put:
            return super().advance(owner, limit, pause)
        poll = self._polls.get(self.pending)
        if poll is not None and not (poll() or poll()):
            self.move_on()
            return False
        with self._device.session():
            return super().advance(owner, limit, pause)


class DeviceInstance(Instance):
    """An instance whose program runs on the rank's device.

    An execution has ended when all its work is on streams. Whatever the receiver of its result puts
    on a stream behind `delivery` can use the result.

    Args:
        binder: of the program, which it binds.
        shared: the other arguments of `Instance`.
        watchdog: is told of each execution that has been put on the device, and of each error.

    Attributes:
        segments: the parts of the program that are captured.
    """

    def __init__(self, binder: DeviceBinder, shared: Shared, watchdog: Watchdog) -> None:
        self._device = binder.device
        statistics, guards, reports = shared  # mypyc gives a starred tuple to one parameter
        super().__init__(binder.linked, binder.bind(), statistics, guards, reports)
        self.segments: Sequence[CapturedSegment] = binder.segments
        self._watchdog = watchdog
        self._work = PendingWork(
            self.program,
            self.module,
            binder.messages,
            self.segments,
            self.position,
            binder.linked.bodies,
        )

    def _make_engine(self, runs_without_grad: bool) -> SessionEngine:
        polls: dict[Instruction | None, Callable[[], bool]] = {}
        for instruction, info in zip(self._code.instructions, self._code.infos, strict=True):
            if info.role is Role.AWAIT and info.port is not None:
                polls[instruction] = info.port.poll
            elif info.role is Role.KEEP:
                polls[instruction] = instruction
        self._session = SessionEngine(
            self._linked,
            self._code,
            self._statistics,
            runs_without_grad,
            device=self._device,
            polls=polls,
        )
        return self._session

    def _deliver(
        self, outputs: tuple[Any, ...], ended: Event | None = None, has_tails: bool = False
    ) -> None:
        """Inside a session, with all work on streams: let the caller's stream have the result.

        Args:
            ended: the event behind the execution. By it another stream can take the result without
                a session, which would put that stream behind later work of the device.
            has_tails: whether the rank has tails. The caller's stream, too, then waits for `ended`
                when it takes the result.
        """
        if self.on_end is None:
            return
        device, caller = self._device, self._device.caller()
        tensors = [value for value in outputs if isinstance(value, Tensor)]
        loans = [loan for segment in self.segments for _, loan in segment.lent]

        def deliver() -> None:
            now = device.caller()
            if now != caller:
                with nullcontext() if ended is not None else device.session():
                    hand_over(device, tensors, loans)
            if ended is not None and (has_tails or now != caller):
                now.wait_event(ended)

        hand_over(device, tensors, loans)
        self.delivery = deliver

    def ended(self, outputs: tuple[Any, ...]) -> None:
        if not self._session.is_put:
            self._deliver(outputs)
        super().ended(outputs)
        self._watchdog.watch(self._work, self.execution)

    def failed(self, error: BaseException) -> None:
        self._watchdog.end_if_failed(error, self._work)
        super().failed(error)


class HandshakeInstance(DeviceInstance):
    """An instance whose hosts announce each message; an error may take a message's place."""

    def __init__(self, binder: DrivenBinder, shared: Shared, watchdog: Watchdog) -> None:
        super().__init__(binder, shared, watchdog)
        self._graphs = interleave(self._code, binder)
        self.segments = self._graphs.segments
        self.record(None)

    def record(self, log: ProgramLog | None) -> None:
        """Record instruction by instruction, without graphs; None ends the recording."""
        if log is None:
            self.engine.use(self._graphs.instructions, self._graphs.place)
        else:
            super().record(log)

    def failed(self, error: BaseException) -> None:
        self._watchdog.end_if_failed(error, self._work)
        if self.engine.located is not None:
            # Instructions that come behind a graph, but stand ahead of the failure in it.
            for instruction in self._graphs.put_off(self.engine.begun - 1):
                instruction()
        super().failed(error)


class DeviceOnlyInstance(DeviceInstance):
    """An instance whose device does the whole program in one go, messages included.

    Ahead of the work each rank tells all others whether its actors are as they were traced. If some
    are not, no rank puts anything on its device, and the execution has failed without having done
    anything. After that nothing may fail, for the other ranks have put their parts on their
    devices, or will. If something fails nevertheless, the job ends.

    It begins when every earlier execution of the rank with announced messages has ended: work that
    is behind it on the device waits for other hosts, and methods of such an execution may wait for
    the device.

    Args:
        binder, shared, watchdog: as `DeviceInstance` takes them.
        abandon: ends the job, and says why.
        in_flight: gives the executions of the rank, in the order of their start.
    """

    def __init__(
        self,
        binder: DeviceOnlyBinder,
        shared: Shared,
        watchdog: Watchdog,
        abandon: Callable[[str], None],
        in_flight: Callable[[], Sequence[Instance]],
    ) -> None:
        self._abandon = abandon
        self._in_flight = in_flight
        self._change: Poison | None = None
        self._has_begun = False
        self._binder = binder
        super().__init__(binder, shared, watchdog)
        self.engine.runs_without_grad = True  # messages and copies are part of no history

    def start(self, inputs: Sequence[Any], execution: int) -> None:
        """Begin an execution, with all actors trusted until a guard says otherwise."""
        self._has_begun = self._session.is_put = False
        self._change = None
        super().start(inputs, execution)

    def drop_graphs(self) -> None:
        """Drop the captured graphs; idempotent."""
        self._binder.forget()

    def _add_reports(self, reports: Reports) -> None:
        """Put the reports ahead of the work, which cannot fail."""
        code, agreement = self._code, self._binder.agreement
        agreed = (agreement,)
        front: list[tuple[Instruction, InstructionInfo]] = [(self._is_due, KEEP)]
        ahead: list[tuple[Instruction, InstructionInfo]] = [
            *((partial(self._report, port), KEEP) for port in reports.send),
            (self._agree, InstructionInfo(Role.COMPUTE, targets=agreed)),
        ]
        for rank, port in reports.receive:
            info = InstructionInfo(Role.AWAIT, targets=agreed, port=port, reporter=rank)
            ahead.append((partial(take_report, port), info))
        ahead.append((self._begin, InstructionInfo(Role.COMPUTE, agreed)))
        last = last_op(self.program)
        for at, instructions in ((self._binder.acquires, ahead), (0, front)):
            for instruction, info in reversed(instructions):
                code.insert(at, instruction, info)
        code.insert(None, self._hand_over, InstructionInfo(Role.COMPUTE, agreed, op=last))
        for port in reports.send:
            code.insert(None, port.poll, KEEP._replace(op=last))
        post_reports(code, reports)

    def _is_due(self) -> bool:
        """True if no earlier execution with announced messages is in progress."""
        for instance in self._in_flight():
            if instance is self:
                return True
            if instance.running and not isinstance(instance, DeviceOnlyInstance):
                return False
        return True

    def _begin(self) -> bool:
        self._has_begun = True
        return True

    def _hand_over(self) -> bool:
        """Deliver the result, with all work on the streams."""
        has_tails = self._device.has(Stream.TAIL)
        self._deliver(self.engine.outputs(), self._binder.end(), has_tails)
        self._session.is_put = True
        return True

    def _distrust(self, error: Exception) -> None:
        propagation = ErrorPropagation(self._linked, self._code)
        propagation.distrust(error)
        self._change = propagation.poison

    def _agree(self) -> bool:
        if self._change is not None:
            raise self._change
        return True

    def ended(self, outputs: tuple[Any, ...]) -> None:
        if self._session.is_put:
            super().ended(outputs)
        else:  # ranks have not agreed, and nothing is on the device
            Instance.ended(self, outputs)

    def _report(self, port: Port) -> bool:
        if self._change is None:
            port.start(None)
        else:
            port.fail(self._change)
        return True

    def failed(self, error: BaseException) -> None:
        self._watchdog.end_if_failed(error, self._work)
        computes = self._code.infos[self.engine.index].role is Role.COMPUTE
        is_under_way = self._has_begun and not self._session.is_put
        if is_under_way and (computes or not isinstance(error, TransportError)):
            description = f"{type(error).__name__}: {error}"
            self._abandon(
                f"rank {self.rank} could not put its part of an execution of "
                f"'{self.module.name}' on its device ({description}), and the other ranks wait for "
                "it; compiled with passes='-capture', a step's errors travel instead"
            )
        super().failed(error)
