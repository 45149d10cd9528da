"""End the whole job when one of its ranks fails, under plain `python` too.

MPI libraries wait in their finalisation for ranks that will never come. So an exception that
ends one Python process leaves the others hanging. The hooks here end the job instead: for an
uncaught exception, in any thread, with that rank's traceback; for `sys.exit` with its code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

from ...backends.errors import PeerLost
from ...tracer.source import traceback_location
from ..environment.detect import Launch
from .listening_ports import is_socket
from .rank_registry import RankRegistry

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a job that Ctrl-C ended, as shells have it."""

DRAIN_SECONDS = 0.1
"""Seconds that the launcher gets to forward what a failing rank wrote, before it kills the rank."""

KILL_SECONDS = 5.0
"""Seconds that the launcher gets to end the job that a rank has asked it to abort."""

PMI_LINE = 1024
"""The longest line of PMI-1."""


@dataclass
class ExitHooks:
    """The hooks of one process; inert in processes forked from it."""

    launch: Launch
    end_job: Callable[[int], None]
    """Ends all ranks with an exit code. Replaced once MPI runs and can do it."""
    registry: RankRegistry | None = None
    """Where the launcher looks for why the job has ended."""
    process: int = field(default_factory=os.getpid)
    failed: bool = False
    """True while this rank is ending the job."""

    def fail(self, code: int) -> None:
        """End the job with `code`. Returns only if the launcher is slow, or cannot end the job."""
        self.failed = True
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(DRAIN_SECONDS)
        self.end_job(code)

    def say(self, text: str) -> None:
        """Write to standard error in one piece, each line under this rank's number."""
        sys.stderr.write(self._numbered(text))
        sys.stderr.flush()

    def give_up(self, text: str, code: int = 1, error: BaseException | None = None) -> None:
        """Say why this rank ends the job, and end it; returns as `fail` does."""
        self.say(text)
        self.record(text, error)
        self.fail(code)

    def record(self, text: str, error: BaseException | None = None) -> None:
        """Let the launcher know why this rank ends the job, and by which exception."""
        if self.registry is not None:
            of_death = isinstance(error, PeerLost) and error.has_died
            self.registry.report(self.launch.rank, self._numbered(text), of_death)

    def _numbered(self, text: str) -> str:
        return "".join(f"[rank {self.launch.rank}] {line}\n" for line in text.splitlines())

    @property
    def active(self) -> bool:
        """True if this process is the rank itself, and is not ending the job already."""
        return os.getpid() == self.process and not self.failed


def install(launch: Launch, registry: RankRegistry | None = None) -> ExitHooks:
    """Hook into uncaught exceptions and `sys.exit`; once for each process."""
    global _guard
    if _guard is None:
        _guard = ExitHooks(launch, _end_before_mpi(launch), registry)
        sys.excepthook = _exception_hook(_guard, sys.excepthook)
        threading.excepthook = _thread_hook(_guard, threading.excepthook)
        sys.exit = _exit_function(_guard, sys.exit)
    return _guard


_guard: ExitHooks | None = None


def say(text: str) -> None:
    """Write to standard error as `ExitHooks.say` does, if this process is a rank."""
    if _guard is not None and _guard.active:
        _guard.say(text)


def give_up(text: str) -> None:
    """Say why this rank ends the job, and end it, if this process is a rank."""
    if _guard is not None and _guard.active:
        _guard.give_up(text)


def record(text: str) -> None:
    """Let the launcher know why this rank ends the job, if this process is a rank."""
    if _guard is not None and _guard.active:
        _guard.record(text)


def say_departure(error: BaseException) -> None:
    """Name the method that has ended this rank's program by `SystemExit`, and its line.

    The interpreter says nothing of a `SystemExit`. The hooks above report any other exception.
    """
    if isinstance(error, SystemExit):
        say(
            f"SystemExit({', '.join(map(repr, error.args))}){whereabouts(error)}. It ends "
            "the program of this rank, unless that catches it. To tell the caller that its call "
            "has failed, raise an Exception"
        )


def whereabouts(error: BaseException) -> str:
    """The user's line that has raised an exception, and its notes, as far as they are known."""
    line = traceback_location(error.__traceback__)
    at = [] if line is None else [f" at {line}"]
    return "".join([*at, *(f"; {note}" for note in getattr(error, "__notes__", ()))])


ExceptionHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
ThreadHook = Callable[[threading.ExceptHookArgs], Any]


def _exception_hook(guard: ExitHooks, previous: ExceptionHook) -> ExceptionHook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not guard.active:
            previous(kind, error, trace)
        elif issubclass(kind, KeyboardInterrupt):
            guard.give_up(f"interrupted{whereabouts(error)}", INTERRUPTED)
        else:
            text = "".join(traceback.format_exception(kind, error, trace))
            if previous is sys.__excepthook__:
                guard.give_up(text, error=error)
            else:
                previous(kind, error, trace)
                guard.record(text, error)
                guard.fail(1)

    return hook


def _thread_hook(guard: ExitHooks, previous: ThreadHook) -> ThreadHook:
    def hook(args: threading.ExceptHookArgs) -> None:
        if not guard.active or args.exc_value is None or issubclass(args.exc_type, SystemExit):
            previous(args)
            return
        name = args.thread.name if args.thread is not None else "?"
        trace = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        guard.give_up(f"in thread {name}:\n" + "".join(trace), error=args.exc_value)

    return hook


class JobExit(SystemExit):
    """The `SystemExit` of `sys.exit` in the main thread of a rank.

    The interpreter reads `code` when it is about to end the process, and no Python code is
    running then. So an exit that takes place can be told from one that is caught, for which the
    interpreter has no hook.
    """

    guard: ExitHooks

    @property
    def code(self) -> Any:  # type: ignore[override]
        """The argument of `sys.exit`."""
        value = self.args[0] if len(self.args) == 1 else self.args or None
        if _called_by_interpreter() and self.guard.active:
            self._leave(value)
        return value

    def _leave(self, value: Any) -> None:
        if value is None or (isinstance(value, int) and value & 0xFF == 0):
            return
        if isinstance(value, int):
            self.guard.record(f"SystemExit({value})")
            self.guard.fail(value & 0xFF)
        else:
            self.guard.give_up(str(value))


def _called_by_interpreter() -> bool:
    """True if the interpreter itself called our caller, a property."""
    try:
        sys._getframe(2)
    except ValueError:
        return True
    return False


def _exit_function(guard: ExitHooks, previous: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    def exit(status: Any = None, /) -> NoReturn:
        """Exit the interpreter by raising SystemExit(status); see `sys.exit`."""
        if threading.current_thread() is not threading.main_thread():
            previous(status)  # which ends that thread alone
        error = JobExit() if status is None else JobExit(status)
        error.guard = guard
        raise error

    return exit


def _end_before_mpi(launch: Launch) -> Callable[[int], None]:
    """Make the function that ends the job while this process has not initialised MPI.

    Open MPI's launcher ends the job when a process exits with a code other than 0. Hydra and Slurm
    do not, and the other ranks would wait for this one in their initialisation for ever; but
    they take a request to abort from the socket over which MPI would talk to them, in the text
    form of the PMI-1 protocol (https://github.com/pmodels/mpich, src/pmi). Slurm takes it after
    a greeting alone.
    """

    def end(code: int) -> None:
        if launch.pmi_socket is None or not is_socket(launch.pmi_socket):
            return
        greeting = b"cmd=init pmi_version=1 pmi_subversion=1\n"
        with socket.socket(fileno=os.dup(launch.pmi_socket)) as link:
            link.settimeout(KILL_SECONDS)
            # The second line has no answer, since the launcher kills this process. A launcher
            # that does not answer the greeting needs none, and takes the request.
            for line in (greeting, f"cmd=abort exitcode={code}\n".encode()):
                with contextlib.suppress(OSError):
                    link.sendall(line)
                    link.recv(PMI_LINE)

    return end
