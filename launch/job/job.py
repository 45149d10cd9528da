"""Run commands one after the other, and leave no process behind that they have started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

GRACE = 3.0
"""Seconds from the request to end the job to its end by force."""
POLL = 0.05
KILLS = 40
"""The most attempts to kill processes; one that is stuck in the kernel cannot be ended."""

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Job:
    """A command at a time, its descendants, and the signals on their way to it.

    Only for a process that does nothing else: all its descendants end with the command. Signals are
    handled inside of a `with` block. One that comes while no command runs counts as well.
    """

    def __init__(self) -> None:
        self._asked_by: signal.Signals | None = None
        self._arrived: list[int] = []
        self._deadline: float | None = None
        self._handling = contextlib.ExitStack()

    def __enter__(self) -> Job:
        _adopt_orphans()
        self._handling.enter_context(_handlers(lambda number, _frame: self._arrived.append(number)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handling.close()

    @property
    def ended_by(self) -> signal.Signals | None:
        """The signal that asked for the job's end."""
        if self._asked_by is None:
            ending = (number for number in self._arrived if number in ENDING)
            self._asked_by = next(map(signal.Signals, ending), None)
        return self._asked_by

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run `command` to its end, forwarding signals; then end the processes that it has left.

        The command runs in a session of its own, so that the terminal's Ctrl-C reaches this process
        alone. A process outside the terminal's session cannot read from the terminal, so if
        standard input is a terminal, the job has no standard input.

        Returns:
            The command's exit code as shells have it: 128 + n if signal n ended it, or asked for
            the job's end before it began.
        """
        if self.ended_by is not None:
            return 128 + self.ended_by
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
            start_new_session=True,
            preexec_fn=_dying_with_us(),
        )
        code = self._watch(process)
        self.end_descendants()
        if self.ended_by is not None:
            return 128 + self.ended_by
        return code if code >= 0 else 128 - code

    def end_descendants(self) -> None:
        """Kill all processes that commands have left."""
        self._force()
        _reap()

    def _watch(self, process: subprocess.Popen[bytes]) -> int:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(POLL)
            while self._arrived:
                self._pass_on(process, signal.Signals(self._arrived.pop(0)))
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._force()

    def _pass_on(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        if number in FORWARDED:
            process.send_signal(number)
        elif self._asked_by is None:
            self._asked_by = number
            self._deadline = time.monotonic() + GRACE
            process.terminate()
        else:  # asked again: wait no longer
            self._deadline = 0.0

    def _force(self) -> None:
        """Kill every descendant; those that lost their parent have become our children."""
        for _ in range(KILLS):
            if not (alive := descendants(os.getpid())):
                return
            for process in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(POLL)


def descendants(ancestor: int, root: Path = Path("/")) -> list[int]:
    """The processes below `ancestor`, by the process table under `root`; parents first."""
    children: dict[int, list[int]] = {}
    for path in root.glob("proc/[0-9]*/stat"):
        try:
            # pid (name) state parent ...; the name may hold spaces and parentheses.
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    processes: list[int] = []
    generation = [ancestor]
    while generation:
        generation = [child for parent in generation for child in children.get(parent, ())]
        processes += generation
    return processes


def _reap() -> None:
    """Collect orphans that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass


@contextlib.contextmanager
def _handlers(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle signals, except those that this process was started to ignore, as by nohup."""
    handled = [n for n in (*ENDING, *FORWARDED) if signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies, so that they can be found (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _dying_with_us() -> Callable[[], None] | None:
    """Make the call by which a new process ends if the launcher is killed by force (Linux)."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
