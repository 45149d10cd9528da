"""Errors of tracing, with the user's line and the remedy in the message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..ir.location import Location


class TraceError(Exception):
    """Something in a step or a method cannot be traced.

    The message has three parts: what happened, the user's file and line, and what to do instead.
    It pickles, since the owner of an actor traces its methods and every rank must raise alike.

    Attributes:
        reason: what happened.
        loc: where in the user's source, if known.
        remedy: what to do.
    """

    __module__ = "cg"  # the public name, which tracebacks show

    def __init__(self, reason: str, *, loc: Location | None = None, remedy: str = "") -> None:
        self.reason = reason
        self.loc = loc
        self.remedy = remedy
        at = f"\n  at {loc}" if loc is not None else ""
        super().__init__(f"{reason}{at}" + (f"\n  help: {remedy}" if remedy else ""))
        note_refusal(self)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.reason, self.loc, self.remedy))


class UnknownRowsError(Exception):
    """Rows that the data chooses are used in a way that has no static shapes.

    Attributes:
        reason, remedy: as of a `TraceError`, which names the method as well.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason, self.remedy = reason, remedy
        super().__init__(f"{reason}; {remedy}")
        note_refusal(self)


def _rebuild(cls: type[TraceError], reason: str, loc: Location | None, remedy: str) -> TraceError:
    return cls(reason, loc=loc, remedy=remedy)


def different(name: str, how: str, loc: Location | None) -> TraceError:
    """The error for a step that differs when it is traced again."""
    return TraceError(
        f"step {name} is not the same when it is traced a second time: {how}. Its Python depends "
        "on something that changes, such as a counter, an iterator, random numbers or the time, "
        "and when it runs, that would stay as it was while it was traced",
        loc=loc,
        remedy="pass what changes as an argument of the step, or compute it in an actor's method "
        "that is marked @cg.opaque",
    )


_NOTED: ContextVar[list[Exception] | None] = ContextVar("cg_refusals", default=None)


def note_refusal(error: Exception) -> None:
    """Remember an error after which the trace in progress must not be used."""
    noted = _NOTED.get()
    if noted is not None:
        noted.append(error)


@contextmanager
def refusals_raised() -> Iterator[None]:
    """Let no handler of the user's swallow a refusal inside the `with` block.

    In plain Python nothing is refused, and such a handler would not run. So the first refusal is
    raised at the end of the block, if it did not come through by itself.

    Raises:
        Exception: the first refusal.
    """
    noted: list[Exception] = []
    token = _NOTED.set(noted)
    raised: BaseException | None = None
    try:
        yield
    except BaseException as error:
        raised = error
        raise
    finally:
        _NOTED.reset(token)
        if noted and (raised is None or isinstance(raised, Exception)):
            note_refusal(noted[0])
    if noted:
        raise noted[0]


@contextmanager
def refusals_dropped() -> Iterator[None]:
    """Ignore refusals inside the `with` block: they belong to an attempt, and not to the trace."""
    token = _NOTED.set(None)
    try:
        yield
    finally:
        _NOTED.reset(token)


def shorten(text: str, limit: int = 60) -> str:
    """A text, cut where it is longer than `limit` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


class Verbatim(str):
    """Text that stands for a value in a message."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
