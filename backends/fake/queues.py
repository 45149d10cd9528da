"""The streams of the fake device, and their events.

The compute stream is the calling thread: work that is put on it happens at once. Every other stream
is a thread that does its work in order; what graphs have on the stream, another thread does. So
messages really are under way while a rank goes on, and a wrong order shows as a wrong value.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol


class CaptureDevice(Protocol):
    """The part of a device that its queues use, to ask whether a graph is captured."""

    recording: list[Callable[[], None]] | None
    base: FakeQueue | None
    patience: float | None

    def check(self) -> None:
        """Raise the error of a device that has failed."""

    def note(self, queue: FakeQueue) -> None:
        """Make a node of the graph that is being captured, behind those of a stream."""


class Turns(Protocol):
    """A communicator, which does one operation after the other."""

    def in_turn(self, work: Callable[[], None]) -> Callable[[], None]:
        """The work, which begins when the operations put on a stream before it have ended."""


class FakeQueue:
    """A stream: a thread, or the caller itself (the compute stream).

    Attributes:
        log: the work that was put on it, in words.
        delay: seconds that its thread waits ahead of all that it does.
        error: the last error of its thread.
        nodes: while a graph is captured, the nodes that the next work depends on.
    """

    def __init__(self, name: str, inline: bool, device: CaptureDevice) -> None:
        self.name = name
        self.device = device
        self.inline = inline
        self.log: list[str] = []
        self.delay = 0.0
        self.error: BaseException | None = None
        self.nodes: tuple[int, ...] | None = None
        self._branch: FakeQueue | None = None
        self._work: queue.Queue[Callable[[], None]] = queue.Queue()
        if not inline:
            threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def branch(self) -> FakeQueue:
        """The queue for captured work of this stream, which other work on it does not hold up.

        On the stream that graphs are replayed on, it is the stream itself.
        """
        if self.inline or self is self.device.base:
            return self
        if self._branch is None:
            self._branch = FakeQueue(f"{self.name} of graphs", False, self.device)
            self._branch.log, self._branch.delay = self.log, self.delay
        return self._branch

    def put(self, label: str, work: Callable[[], None], comm: Turns | None = None) -> None:
        """Do some work, or record it while the device is capturing.

        Args:
            comm: the communicator whose operation it is, if any.
        """
        self.device.check()
        recording = self.device.recording
        if recording is not None:
            branch = self.branch
            recording.append(lambda: branch.put(label, work, comm))
            self.device.note(self)
            return
        self.log.append(label)
        in_turn = work if comm is None else comm.in_turn(work)
        if not self.inline:
            self._work.put(in_turn)
        elif comm is None:
            in_turn()
        else:
            self._communicate(in_turn)

    def _communicate(self, in_turn: Callable[[], None]) -> None:
        """Do an operation of a communicator here; one that is broken off ends as on a thread."""
        try:
            in_turn()
        except TimeoutError:  # of `patience`
            raise
        except (EOFError, OSError) as error:
            self.error = error.with_traceback(None)  # frames would hold the graph

    def wait_event(self, event: FakeEvent) -> None:
        """Let work that is put on the stream later wait for the event."""
        if self.device.recording is not None:
            branch = self.branch
            self.device.recording.append(lambda: branch.wait_event(event))
            assert event.captured, "a graph cannot wait for what is outside of it"
            self.nodes = tuple(sorted({*(self.nodes or ()), *event.nodes}))
            return
        passed = event.passed
        self.put(f"wait {event.name}", lambda: wait(passed, self.name, self.device.patience))

    def synchronize(self) -> None:
        """Block the host until the stream is empty."""
        passed = threading.Event()
        self.put("synchronize", passed.set)
        wait(passed, self.name, self.device.patience)

    def drain(self) -> None:
        """Block the host until the stream and its graphs have no work left; records nothing.

        Like other waits of the host it ends by Ctrl-C, and other threads run meanwhile.
        """
        if self._work.unfinished_tasks:
            passed = threading.Event()
            self._work.put(passed.set)
            wait(passed, self.name, self.device.patience)
        if self._branch is not None:
            self._branch.drain()

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if self.delay:
                time.sleep(self.delay)
            try:
                work()
            except BaseException as error:  # those who wait for its result find out
                self.error = error
            self._work.task_done()
            del work  # with the tensors that it refers to


def wait(passed: threading.Event, waiting: str, patience: float | None) -> None:
    """Block until an event is passed.

    Raises:
        TimeoutError: it is not passed within `patience` seconds.
    """
    if not passed.wait(patience):
        raise TimeoutError(f"stream {waiting} has waited {patience:g} s for an event")


class FakeEvent:
    """An event; recording it again moves it.

    Args:
        patience: seconds after which a wait for it raises TimeoutError; None for never.
        check: raises the error of the event's device, if that has failed.
    """

    def __init__(
        self, patience: float | None = None, check: Callable[[], None] = lambda: None
    ) -> None:
        self.name = f"e{next(_numbers)}"
        self.patience = patience
        self.check = check
        self.passed = threading.Event()
        self.passed.set()
        self.captured = False
        self.nodes: tuple[int, ...] = ()

    def record(self, stream: FakeQueue) -> None:
        """Put the event behind all work that is on the stream."""
        if stream.device.recording is not None:
            self.captured, self.nodes = True, stream.nodes or ()
            branch = stream.branch
            stream.device.recording.append(lambda: self.record(branch))
            return
        passed = self.passed = threading.Event()
        stream.put(f"record {self.name}", passed.set)

    def query(self) -> bool:
        """True if the queue has passed it."""
        self.check()
        return self.passed.is_set()

    def synchronize(self) -> None:
        """Block the host until the queue has passed it."""
        self.check()
        wait(self.passed, "host", self.patience)


class FakeTimer(FakeEvent):
    """An event that notes when it is passed."""

    at = 0.0

    def record(self, stream: FakeQueue) -> None:
        """Put the event behind all work that is on the stream."""
        super().record(stream)
        stream.put(f"time {self.name}", self._note)

    def _note(self) -> None:
        self.at = time.perf_counter()


_numbers = itertools.count(1)
