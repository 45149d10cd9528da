"""Tell an exception of a signal's handler from one that the interrupted code has raised."""

from __future__ import annotations

import signal
from functools import partial
from types import CodeType


def is_interruption(error: BaseException) -> bool:
    """True if `error` came in the middle of something that has not failed.

    That is Ctrl-C, `SystemExit`, and an error that a signal's handler has raised; or a group with
    one of these. Any other `BaseException`, such as a cancelled task's error, is a failure like an
    `Exception`.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return True
    if isinstance(error, BaseExceptionGroup) and any(map(is_interruption, error.exceptions)):
        return True
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def leaves(error: BaseException) -> bool:
    """True if `error`, which a method has raised, is for the whole process, not for its caller.

    An `Exception` is for the caller, also where a handler has raised it: the method has failed.
    """
    return not isinstance(error, Exception) and is_interruption(error)


def _code(handler: object) -> CodeType | None:
    """The code of a handler; None where it is not written in Python."""
    while isinstance(handler, partial):
        handler = handler.func
    calls = [vars(cls)["__call__"] for cls in type(handler).__mro__ if "__call__" in vars(cls)]
    for function in (handler, getattr(handler, "__func__", None), *calls):
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None
