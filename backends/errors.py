"""Exceptions of binding and running a program."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from ..ir.location import Location


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that ended an execution, as plain data that any rank can be told.

    Attributes:
        type_name: the exception's class, with its module unless that is `builtins`.
        message: the exception's own text.
        rank: where it was raised.
        op: the op that raised it, in the IR's text form.
        actor: the actor whose method it was, or None.
        method: the method, or the function that belongs to no actor; None where the op was no
            call.
        location: the user's line that asked for the op.
        source: the text of that line.
        traceback: the formatted traceback, beginning in the method.
        raised: the line of a traced method that raised; the traceback shows generated code then.
    """

    type_name: str
    message: str
    rank: int
    op: str
    actor: str | None = None
    method: str | None = None
    location: Location | None = None
    source: str = ""
    traceback: str = ""
    raised: Location | None = None

    @property
    def where(self) -> str:
        """The op or method that was running, and its rank."""
        operation = self.op
        if self.method is not None:
            operation = f"{self.actor}.{self.method}" if self.actor else self.method
        return f"on rank {self.rank} in {operation}"

    def describe(self) -> str:
        """The message that a user reads."""
        head = f"{self.type_name} {self.where}"
        lines = [f"{head}: {self.message}"]
        if self.location is not None:
            lines.append(f"  called from {self.location}")
        if self.source:
            lines.append(f"    {self.source}")
        if self.raised is not None:
            lines.append(f"  raised at {self.raised}")
        return "\n".join([*lines, "", self.traceback]).rstrip()


class RemoteError(RuntimeError):
    """An exception in a method or an op of a running step.

    Every rank raises it, with the same `failure`; on the rank where it happened, `__cause__` is
    the original exception. It can be pickled.
    """

    __module__ = "cg"  # the public name, which tracebacks show

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.describe())
        self.failure = failure

    @property
    def type_name(self) -> str:
        """The class of the original exception."""
        return self.failure.type_name

    @property
    def rank(self) -> int:
        """The rank on which it was raised."""
        return self.failure.rank

    @property
    def actor(self) -> str | None:
        """The actor whose method raised it."""
        return self.failure.actor

    @property
    def method(self) -> str | None:
        """The method that raised it."""
        return self.failure.method

    @property
    def location(self) -> Location | None:
        """The line of the step that called the method."""
        return self.failure.location

    def __reduce__(self) -> tuple[type[RemoteError], tuple[Failure]]:
        return (type(self), (self.failure,))


class DeadlockError(RuntimeError):
    """No rank can move any more; the message names who waits for whom, and where."""

    __module__ = "cg"  # the public name, which tracebacks show


class StepTimeout(TimeoutError):
    """A step has not ended by its deadline; the message says where this rank waits."""

    __module__ = "cg"  # the public name, which tracebacks show


class CapacityError(RuntimeError):
    """As many executions are in flight as the graph was compiled for, and none was to be waited
    for."""

    __module__ = "cg"  # the public name, which tracebacks show


class ExecutionLost(RuntimeError):
    """An execution was given up: Ctrl-C, or another signal's handler, came where cg could not go on
    with it."""

    __module__ = "cg"  # the public name, which tracebacks show


class PlanMismatch(RuntimeError):
    """The ranks have compiled different plans; the message shows the first line that differs."""

    __module__ = "cg"  # the public name, which tracebacks show


class BindError(ValueError):
    """A program cannot be bound: a body, a communicator or a buffer is missing or does not fit."""


class InputError(TypeError):
    """The inputs of an execution do not fit the program's parameters."""


class ResultError(TypeError):
    """A method returned something else than its declaration says."""


class TransportError(RuntimeError):
    """A value cannot be sent as it is, or the messages of a channel do not match."""

    __module__ = "cg"  # the public name, which tracebacks show


class PeerLost(TransportError):
    """A rank has ended, or has given up, while others still needed it.

    Attributes:
        rank: which one.
        has_died: whether its process has ended without a word.
    """

    __module__ = "cg"  # the public name, which tracebacks show

    def __init__(self, message: str, rank: int, has_died: bool = False) -> None:
        super().__init__(message, rank, has_died)
        self.rank = rank
        self.has_died = has_died

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownCommunicator(LookupError):
    """No communicator is registered under that name."""


def type_name(error: BaseException) -> str:
    """The exception's class as a traceback prints it."""
    cls = type(error)
    if cls.__module__ in ("builtins", "__main__"):
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


def message_text(error: BaseException) -> str:
    """The text of an exception; a user's `__str__` may raise one itself."""
    try:
        return str(error)
    except Exception:
        return "<its __str__ has failed>"


def traceback_text(error: BaseException) -> str:
    """The formatted traceback, without the frames of this package that lead to the method."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


_OURS = ("cg.backends.", "cg.tracer.")
