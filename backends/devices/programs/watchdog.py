"""Watch a device for executions that do not end, and for faults of it or of its messages.

Each of them ends the job.

The host puts work on streams and goes on, so it does not notice a message that never comes. When it
waits for the device at last, in a method or in the caller's program, nobody is left to look at a
clock. The same is true if the driver makes it wait while it puts work on a stream. So a thread
looks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol
from weakref import WeakSet

from ....ir.ops import Call
from ....ir.ops.module import FunctionKind, Module, Program
from ...device import Device, Event
from ...failures.device_faults import REMEDY, DeviceFault, cause_of, fault_in, first_line
from ...failures.flight import Position
from .pending_work import PendingWork
from .tail import last_stream

INTERVAL = 0.25
"""Seconds between two looks."""

STUCK = 1.0
"""Seconds after which a driver that takes nothing seems to wait for the device."""

GRACE = 2.0
"""Seconds past the timeout in which the host may find out by itself that it waits in vain."""


class WatchedProgram(Protocol):
    """A bound program whose execution is watched."""

    program: Program
    module: Module

    def position(self) -> Position:
        """Where it is; called by another thread."""


def put_by(watched: WatchedProgram) -> Position | None:
    """Where a program puts work on its device, if it does; no host should take long over that.

    An opaque method may take as long as it likes, and a wait for another host has its own deadline.
    """
    at = watched.position()
    if not at.running or at.awaited is not None:
        return None
    op = watched.program.ops[at.op]
    if isinstance(op, Call):
        is_opaque = watched.module.functions[op.fn.name].kind is FunctionKind.OPAQUE
        return None if is_opaque else at
    return at


@dataclass(frozen=True, slots=True)
class Put:
    """An execution that has been put on the device as a whole.

    Attributes:
        work: what the program puts on the device.
        execution: its number.
        since: when it was put there, in seconds of the monotonic clock.
        event: behind all of it.
    """

    work: PendingWork
    execution: int
    since: float
    event: Event


class Watchdog:
    """Watches one program's executions on its device.

    Each execution has an event behind it, which is its own until the device has passed it. So only
    one thread at a time uses an event: the one that puts work on the device records it and lines it
    up; the watchdog queries it, takes it out of the line, and lays it aside to be used again.
    Neither waits for the other, and no execution is left out, however many are on the device.

    Args:
        device: of this rank.
        timeout: seconds that an execution may take on the device; None for no limit.
        faults: returns the failures of messages under way; called by the watchdog's thread.
        bark: called once, by that thread, with a description of what is wrong.
        putting: returns where the host puts work on the device at the moment, if it does.
        end: called in place of `bark` if the device has failed, which leaves nothing to look for:
            by that thread, or by the one that learns of it.
        noted: returns the error that an execution has noted on the device, if one has. The next
            execution on this rank raises the error if it comes in time.
        look_after: called where the host puts work on the device and does not get on: it may be in
            a call that waits, while messages of hosts are under way.
        release: called where the host puts work on the device and does not get on, while the device
            has ended all earlier executions. If another rank has failed, it lets the device go on.
    """

    def __init__(
        self,
        device: Device,
        timeout: float | None,
        faults: Callable[[], Sequence[str]],
        bark: Callable[[str], None],
        putting: Callable[[], Position | None] = lambda: None,
        end: Callable[[str], None] | None = None,
        noted: Callable[[], str | None] = lambda: None,
        look_after: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._device = device
        self._timeout = timeout
        self._faults = faults
        self._bark = bark
        self._putting = putting
        self._end = bark if end is None else end
        self._noted = noted
        self._look_after = look_after
        self._release = release
        self._noted_since: float | None = None
        self._put: tuple[Position, float] | None = None
        self._line: deque[Put] = deque()
        self._spare: deque[Event] = deque()
        self._passed = monotonic()
        self._stop = threading.Event()
        _watchdogs.add(self)
        self._thread = threading.Thread(target=self._run, name="cg watchdog", daemon=True)
        self._thread.start()

    def watch(self, work: PendingWork, execution: int) -> None:
        """Watch an execution that has been put on the device as a whole; called by one thread."""
        if self._stop.is_set():
            return  # nobody looks any more, nor takes anything out of the line
        try:
            event = self._spare.popleft()
        except IndexError:
            event = self._device.event()
        event.record(last_stream(self._device))
        self._line.append(Put(work, execution, monotonic(), event))

    def close(self) -> None:
        """Stop watching; idempotent."""
        self._stop.set()

    def join(self) -> None:
        """Wait until its thread has ended, which it does soon after `close`."""
        self._thread.join(GRACE)

    @property
    def is_closed(self) -> bool:
        """Whether nobody takes anything out of the line any more."""
        return self._stop.is_set()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            try:
                trouble = self.look()
            except DeviceFault as fault:
                self._end(str(fault))
                return
            except Exception as error:
                # Nobody would look any more, and the next hang would last for ever.
                trouble = (
                    "the device and its messages cannot be watched any more: a look at them has "
                    f"failed with {type(error).__name__}: {error}"
                )
            if trouble is not None:
                self._bark(trouble)
                return

    @property
    def line(self) -> Sequence[Put]:
        """The executions that the device has not been seen to pass; for any thread."""
        return tuple(self._line.copy())

    def look(self) -> str | None:
        """Describe what has gone wrong by now: with messages, on the host or on the device.

        Raises:
            DeviceFault: the device has failed, and its messages with it.
        """
        overdue = self._look_at_device()
        faults = self._faults()
        if faults:
            return "messages between devices have failed: " + "; ".join(faults)
        return self._look_at_notes() or self._look_at_host() or overdue

    def _look_at_notes(self) -> str | None:
        """An error that nobody has raised in time; its execution has computed wrong values."""
        error, now = self._noted(), monotonic()
        if error is None:
            self._noted_since = None
            return None
        if self._noted_since is None:
            self._noted_since = now
        return error if now - self._noted_since > GRACE else None

    def end_if_failed(self, error: BaseException, running: PendingWork) -> None:
        """End the job if an error says that the device has failed; whoever meets it calls this.

        Args:
            running: the work that the host was putting on the device.
        """
        fault = fault_of(error, running)
        if fault is not None:
            self._end(str(fault))

    def _look_at_host(self) -> str | None:
        at, now = self._putting(), monotonic()
        if at is None or self._put is None or self._put[0] != at:
            self._put = None if at is None else (at, now)
            return None
        if now - self._put[1] > STUCK:
            self._look_after()
            if not _on_device():
                self._release()
        if self._timeout is None or now - self._put[1] < self._timeout + GRACE:
            return None
        return (
            f"the device has not taken the next piece of execution {at.execution} for "
            f"{self._timeout:g} s: its driver waits for what is on it, and that for a message"
        )

    def _look_at_device(self) -> str | None:
        line = self._line
        try:
            if line:
                self._let_go()
            else:
                self._ask()
        except RuntimeError as error:
            raise _described(error) from error
        if not line or self._timeout is None:
            return None
        first = line[0]
        if monotonic() - max(first.since, self._passed) <= self._timeout:
            return None
        return (
            f"the host has put all of execution {first.execution} of {first.work.name} on the "
            f"device, which has not ended it after {self._timeout:g} s. The device is at:\n"
            f"{first.work.unfinished(first.execution)}"
        )

    def _ask(self) -> None:
        """Query an event that the device has passed: the query raises if the device has failed."""
        try:
            event = self._spare.popleft()
        except IndexError:
            return
        event.query()
        self._spare.append(event)

    def _let_go(self) -> None:
        """Take executions that the device has passed out of the line; it passes them in order.

        An execution's time begins when the device has passed the one ahead of it.
        """
        line = self._line
        newest = line[-1]
        last = newest if newest.event.query() else None
        while line and (last is not None or line[0].event.query()):
            passed = line.popleft()
            self._spare.append(passed.event)
            self._passed = monotonic()
            if passed is last:
                last = None


_watchdogs: WeakSet[Watchdog] = WeakSet()
"""All watchdogs whose threads run, and perhaps others that are closed."""


def stop_watching() -> None:
    """Close all watchdogs, and wait for their threads; for the end of the process.

    A thread that comes back from the device's library while the interpreter ends is unwound through
    frames of C++ that allow no such thing, which aborts the process.
    """
    watchdogs = tuple(_watchdogs)
    for watchdog in watchdogs:
        watchdog.close()
    for watchdog in watchdogs:
        watchdog.join()


def fault_of(error: BaseException, running: PendingWork | None = None) -> DeviceFault | None:
    """Describe the failure of a device, wherever it has come up as an error.

    Args:
        error: any error.
        running: the work that the host was putting on the device; None if there was none.

    Returns:
        The description; None if the device has not failed, or had nothing of cg's on it.
    """
    failed = fault_in(error)
    if failed is None or (running is None and not _on_device()):
        return None
    return _described(failed, running)


def _on_device() -> list[Put]:
    """All executions that devices have not been seen to pass, the oldest first."""
    watching = [watchdog for watchdog in tuple(_watchdogs) if not watchdog.is_closed]
    puts = [put for watchdog in watching for put in watchdog.line]
    return sorted(puts, key=lambda put: put.since)


def _described(error: BaseException, running: PendingWork | None = None) -> DeviceFault:
    puts = _on_device()
    works = [put.work for put in puts] + ([] if running is None else [running])
    place = ""
    if puts:
        place = f" in execution {puts[0].execution} of {puts[0].work.name} or behind it"
    elif running is not None and running.running is not None:
        place = f" in execution {running.running} of {running.name}"
    message = f"the device has failed{place}, and cannot be used any more: {first_line(error)}"
    cause = cause_of(error)
    if not cause:
        return DeviceFault(message)
    methods: list[str] = []
    for index, work in enumerate(works):
        if not any(work is before for before in works[:index]):
            methods += work.suspects(begun=not puts)
    if methods:
        methods.insert(0, "These methods were on the device and use indices, in their order:")
    return DeviceFault("\n".join([message, cause, *methods, REMEDY]))


def advice(logs: Sequence[str]) -> str:
    """Advice on a device that does not end its work.

    Args:
        logs: where the libraries that carry messages say more, in words.
    """
    places = " and at ".join(["the output of the other ranks", *logs])
    return (
        f"\nA message has two ends: look at {places} for the same message, by its channel and its "
        "number, and for an error ahead of this one. Compiled with passes='-capture', no graph "
        "hides at which op the device is. Where it only needs longer, raise compile(timeout=...) "
        "or CG_TIMEOUT"
    )
