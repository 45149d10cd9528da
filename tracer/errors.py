"""What tracing raises, with the user's line and the remedy in the message."""

from __future__ import annotations

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

    def __init__(self, reason: str, *, loc: Location | None = None, remedy: str = "") -> None:
        self.reason = reason
        self.loc = loc
        self.remedy = remedy
        super().__init__(_render(reason, loc, remedy))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.reason, self.loc, self.remedy))


def _rebuild(cls: type[TraceError], reason: str, loc: Location | None, remedy: str) -> TraceError:
    return cls(reason, loc=loc, remedy=remedy)


def _render(reason: str, loc: Location | None, remedy: str) -> str:
    lines = [reason]
    if loc is not None:
        lines.append(f"  at {loc}")
    if remedy:
        lines.append(f"  help: {remedy}")
    return "\n".join(lines)
