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
from ..values.interface import Call

_PASS_ON = frozenset(
    {
        contextlib.__file__,
        *(
            os.path.join(os.path.dirname(torch.__file__), *path)
            for path in (("utils", "_contextlib.py"), ("_dynamo", "eval_frame.py"))
        ),
    }
)
"""Modules of decorators that pass on the very arguments which they are given."""


def check_arguments(call: Call) -> None:
    """Return if the method can be called with so many arguments, by these names.

    A method whose signature cannot be asked for is called as it is asked to; so is what a decorator
    wraps that may change arguments.

    Raises:
        TraceError: it cannot.
    """
    try:
        parameters = inspect.signature(_taker(call.function), follow_wrapped=False)
    except (TypeError, ValueError):
        return  # of a builtin, say
    # By the shape of the call alone: leaves may stand for what cannot be made before it runs.
    args, kwargs = call.signature.spec.children()
    try:
        parameters.bind(*[None] * args.num_children, **dict.fromkeys(kwargs.context))
    except TypeError as error:
        raise _refusal(parameters, str(error), call) from None


def explain_misfit(error: Exception, call: Call) -> TraceError | None:
    """The error to raise instead if `error` says that a decorated method cannot take arguments.

    A decorator of the user's may add arguments, take some or rename them, so what it wraps cannot
    be asked before it runs. If it then calls that in a way in which it cannot be called, this is
    what Python says, and the method's code has not been entered.
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
    """Return what is below all decorators that say what they wrap."""
    while (below := _below(function)) is not function:
        function = below
    return function


def definition(function: Callable[..., Any]) -> Location | None:
    """The place where a function is defined, decorators looked through; None if not in Python."""
    code = getattr(innermost(function), "__code__", None)
    if code is None:
        return None
    return Location(code.co_filename, code.co_firstlineno, code.co_name)


def _refusal(parameters: inspect.Signature, reason: str, call: Call) -> TraceError:
    at = "" if call.home is None else f", at {call.home}"
    return TraceError(
        f"the arguments do not fit {call.what}{parameters}: {reason}",
        loc=call.loc,
        remedy=f"pass what it takes, or change what it takes where it is defined{at}",
    )


def _taker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what takes the arguments: below all that is known to pass them on as they are."""
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
    """Return what a function wraps, bound as it is; the function itself if it does not say."""
    if not isinstance(function, MethodType):
        plain: Callable[..., Any] = inspect.getattr_static(function, "__wrapped__", function)
        return plain
    owner: Any = function.__self__
    if function.__func__ is torch.nn.Module.__call__:
        forward: Callable[..., Any] = owner.forward
        return forward
    wrapped = inspect.getattr_static(function.__func__, "__wrapped__", None)
    return function if wrapped is None else MethodType(wrapped, owner)
