"""Find where a function is defined, and check that the arguments of a call fit its parameters."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable
from traceback import walk_tb
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.nn.modules import module as modules

from ...ir.location import Location
from ..errors import TraceError
from ..values.interface import TracedCall

_PASS_ON = frozenset(
    {
        contextlib.__file__,
        *(
            os.path.join(os.path.dirname(torch.__file__), *path)
            for path in (("utils", "_contextlib.py"), ("_dynamo", "eval_frame.py"))
        ),
    }
)
"""Files whose decorators pass their arguments on unchanged."""


def check_arguments(call: TracedCall) -> None:
    """Check that the method takes this many arguments, by these names.

    A method without a signature passes the check. So does one under a decorator that may change
    the arguments.

    Raises:
        TraceError: the arguments do not fit.
    """
    try:
        parameters = inspect.signature(_taker(call.function), follow_wrapped=False)
    except (TypeError, ValueError):
        return  # a builtin, say
    # None stands for each argument: some values do not exist before the step runs.
    args, kwargs = call.signature.spec.children()
    try:
        parameters.bind(*[None] * args.num_children, **dict.fromkeys(kwargs.context))
    except TypeError as error:
        raise _refusal(parameters, str(error), call) from None


def explain_misfit(error: Exception, call: TracedCall) -> TraceError | None:
    """Translate `error` if it says that a decorated method does not take its arguments.

    A decorator of the user's may add, drop or rename arguments, so the method's signature says
    nothing before the call. If the decorator then passes arguments that do not fit, Python raises
    a `TypeError` before it enters the method's code.

    Returns:
        The error to raise instead; None if `error` says anything else.
    """
    wrapped = innermost(call.function)
    entry = f"{getattr(wrapped, '__qualname__', '')}() "
    code = getattr(wrapped, "__code__", None)
    if wrapped is call.function or code is None or not isinstance(error, TypeError):
        return None
    entered = any(frame.f_code is code for frame, _ in walk_tb(error.__traceback__))
    if entered or not str(error).startswith(entry):
        return None
    parameters = inspect.signature(wrapped, follow_wrapped=False)
    return _refusal(parameters, str(error).removeprefix(entry), call)


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function below all decorators that set `__wrapped__`."""
    while (below := _below(function)) is not function:
        function = below
    return function


def definition(function: Callable[..., Any]) -> Location | None:
    """Return the line that defines a function, below its decorators; None if not in Python."""
    code = getattr(innermost(function), "__code__", None)
    if code is None:
        return None
    return Location(code.co_filename, code.co_firstlineno, code.co_name)


def _refusal(parameters: inspect.Signature, reason: str, call: TracedCall) -> TraceError:
    at = "" if call.home is None else f", at {call.home}"
    return TraceError(
        f"the arguments do not fit {call.shown}{parameters}: {reason}",
        loc=call.loc,
        remedy=f"pass what it takes, or change what it takes where it is defined{at}",
    )


def _taker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function below all decorators that are known to pass arguments on unchanged."""
    while _passes_on(function):
        function = _below(function)
    return function


def _passes_on(function: Callable[..., Any]) -> bool:
    plain = function.__func__ if isinstance(function, MethodType) else function
    if isinstance(function, MethodType) and plain is torch.nn.Module.__call__:
        owner: Any = function.__self__
        return not (owner._forward_pre_hooks or modules._global_forward_pre_hooks)
    if isinstance(plain, functools._lru_cache_wrapper):
        return True
    known = isinstance(plain, FunctionType) and plain.__code__.co_filename in _PASS_ON
    return known and hasattr(plain, "__wrapped__")


def _below(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a function wraps, bound to the same object; itself if it wraps nothing."""
    if not isinstance(function, MethodType):
        plain: Callable[..., Any] = inspect.getattr_static(function, "__wrapped__", function)
        return plain
    owner: Any = function.__self__
    if function.__func__ is torch.nn.Module.__call__:
        forward: Callable[..., Any] = owner.forward
        return forward
    wrapped = inspect.getattr_static(function.__func__, "__wrapped__", None)
    return function if wrapped is None else MethodType(wrapped, owner)
