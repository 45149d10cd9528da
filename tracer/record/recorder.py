"""Intercept the torch functions that a step calls, and record them as ops.

A torch function of values of the step becomes a `call` of a function, which is traced once for
each signature. A torch function without such operands makes constants. An in-place write makes a
new value, and the tensor then stands for this value.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from ..errors import TraceError
from ..source import caller_location
from ..values.group import Group
from ..values.interface import Callee, TorchTarget
from ..values.specs import TensorSpec
from ..values.values import ObjectValue, TracedTensor
from .groups.group_calls import group_of
from .intrinsics.constants import is_random, make_constants
from .session.arguments import Arguments, take_apart
from .session.calls import find_or_declare, record
from .session.session import Session, current, placed
from .session.unsupported_ops import Function, TorchCall, check, describe

_TRAINING_REMEDY = (
    "call it in an actor's method, which the step calls after cg.backward(loss): def update(self): "
    "self.opt.step(); self.opt.zero_grad(). Gradients of several actors are clipped together by "
    "cg.clip_grad_norm(actors, max_norm)"
)


class Recorder(TorchFunctionMode):
    """A torch function mode that records torch functions into a session while it is entered."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        session.recorder = self

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._session.paused is not None:
            return func(*args, **kwargs)
        return _intercept(self._session, func, args, kwargs)


_METADATA = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "__len__", "__hash__"),
        *("element_size", "is_floating_point", "is_complex", "is_signed", "is_inference"),
        *("is_tensor", "_is_view", "has_names", "is_same_size"),
    }
)
_RECORDED_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})


def _intercept(
    session: Session, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    kind, name = describe(func)
    if kind == "call" and name in _METADATA:
        return func(*args, **kwargs)
    traced = _has_values((args, kwargs))
    if not traced and name in ("__repr__", "__str__", "__format__"):
        return func(*args, **kwargs)  # of a real tensor
    call = TorchCall(func, kind, name, args, kwargs, caller_location(3))
    if traced:
        check(call)
    elif name == "grad" and kind in ("get", "set"):
        raise TraceError(
            f"{call.shown} of a module in a step: zero_grad(), clip_grad_norm_() and all other "
            "work on gradients would happen once, while the step is traced, and never again",
            loc=call.loc,
            remedy=_TRAINING_REMEDY,
        )
    if kind == "get" and name not in _RECORDED_PROPERTIES:
        return func(*args, **kwargs)
    if name in ("__eq__", "__ne__") and args[1] is None:
        return NotImplemented
    if not traced and not is_random(name):
        return make_constants(session, call)
    if _writes_in_place(call):
        return _write(session, call)
    return _compute(session, call)


def _has_values(tree: Any) -> bool:
    """True if a value, or a nest of containers, holds a value of a step."""
    if isinstance(tree, TracedTensor | ObjectValue):
        return True
    if isinstance(tree, dict):
        return any(map(_has_values, tree.values()))
    if isinstance(tree, tuple | list):
        return any(map(_has_values, tree))
    if type(tree) is slice:
        return any(map(_has_values, (tree.start, tree.stop, tree.step)))
    return False


def _compute(session: Session, call: TorchCall) -> Any:
    """Record a torch function; return the results that the step's Python gets."""
    kwargs = call.kwargs
    if is_random(call.name):
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    arguments = _take_apart(session, call, kwargs)
    group = group_of(session, arguments.operands, call.shown, call.loc)
    callee = _find(session, call, call.func, arguments, group)
    if not callee.specs:
        return callee.results.fill(())
    place = placed(arguments.operands, session.everywhere) if group is None else group.place
    return record(session, callee, arguments, place, call.loc)


def _take_apart(session: Session, call: TorchCall, kwargs: dict[str, Any]) -> Arguments:
    session.ambient.check(call.shown, call.loc)
    arguments = take_apart(session, call.args, kwargs, call.shown, call.loc)
    for value in arguments.values:
        if isinstance(value, ObjectValue):
            raise TraceError(
                f"{call.shown} takes {value!r}, an object that is known only when the step runs",
                loc=call.loc,
                remedy="do this in an actor's method that takes the object",
            )
    return arguments


def _find(
    session: Session, call: TorchCall, func: Function, arguments: Arguments, group: Group | None
) -> Callee:
    def subject() -> tuple[TorchTarget, None, str]:
        dunder = call.name.startswith("__")
        name = f"torch.{call.name.strip('_') if dunder else call.name}"
        return TorchTarget(func, name, group), None, name

    called = func if group is None else (func, group)
    return find_or_declare(session, called, arguments, subject, call.loc)


@dataclass(frozen=True)
class InPlace:
    """Turns a function that writes to its first argument into one that returns the new value."""

    function: Function

    def __call__(self, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        written = target.clone()
        self.function(written, *args, **kwargs)
        return written


_AUGMENTED = frozenset(
    {
        *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__"),
        *("__ipow__", "__imatmul__", "__iand__", "__ior__", "__ixor__", "__ilshift__"),
        *("__irshift__", "__idiv__"),
    }
)


def _writes_in_place(call: TorchCall) -> bool:
    name = call.name
    if name in _AUGMENTED or name == "__setitem__":
        return True
    if name.endswith("_") and not name.endswith("__"):
        return True
    position = _inplace_position(call.func)
    if position is None:
        return False
    args_from_flag = call.args[position:]
    return bool(args_from_flag[0] if args_from_flag else call.kwargs.get("inplace", False))


@cache
def _inplace_position(func: Function) -> int | None:
    """The position of the argument `inplace` of a function of torch.nn.functional, if any."""
    if getattr(func, "__module__", None) != "torch.nn.functional":
        return None
    try:
        names = list(inspect.signature(func).parameters)
    except ValueError:  # a builtin function, which has no such argument
        return None
    return names.index("inplace") if "inplace" in names else None


def _write(session: Session, call: TorchCall) -> Any:
    """Record a write to a tensor, and let the tensor stand for its new value."""
    target = call.args[0] if call.args else None
    arguments = _take_apart(session, call, call.kwargs)
    if not isinstance(target, TracedTensor):
        raise TraceError(
            f"{call.shown} writes into something that is not a tensor of the step",
            loc=call.loc,
            remedy="make the tensor in the step, for example by torch.zeros",
        )
    _check_writable(target, call)
    group = group_of(session, arguments.operands, call.shown, call.loc)
    callee = _find(session, call, InPlace(call.func), arguments, group)
    before, after = target.traced.spec, callee.specs[0]
    assert isinstance(before, TensorSpec)
    assert isinstance(after, TensorSpec)
    if before.shape != after.shape or before.dtype is not after.dtype:
        raise TraceError(
            f"{call.shown} would change the shape or dtype of a value in place",
            loc=call.loc,
            remedy="use the function that returns a new tensor, and its result",
        )
    place = placed(arguments.operands, session.everywhere) if group is None else group.place
    written = record(session, callee, arguments, place, call.loc)
    session.rebind(target, written.traced.value, after)
    if after.requires_grad != before.requires_grad:
        torch.Tensor.requires_grad_(target, after.requires_grad)
    return None if call.name == "__setitem__" else target


def _check_writable(target: TracedTensor, call: TorchCall) -> None:
    storage = target.traced.storage
    name = target.traced.value.name
    remedy = "write to a copy, made by .clone(), or use the function that returns a new tensor"
    if storage is not None and storage.pinned is not None:
        raise TraceError(
            f"{call.shown} writes to %{name}, and {storage.pinned}; the write would be seen "
            "there in plain Python, and not in the compiled step",
            loc=call.loc,
            remedy=remedy,
        )
    if storage is not None and storage.others(target):
        raise TraceError(
            f"{call.shown} writes to %{name}, which is a view of another value or has views; "
            "the write would be seen there in plain Python, and not in the compiled step",
            loc=call.loc,
            remedy=remedy,
        )
    spec = target.traced.spec
    if isinstance(spec, TensorSpec) and spec.requires_grad and not torch.is_grad_enabled():
        raise TraceError(
            f"{call.shown} writes to %{name}, which requires a gradient, under torch.no_grad",
            loc=call.loc,
            remedy=remedy,
        )


@contextmanager
def training_refused() -> Iterator[None]:
    """Refuse calls of an optimizer's `step` by the traced step inside the `with` block."""
    handle = register_optimizer_step_pre_hook(_refuse_optimizer)
    try:
        yield
    finally:
        handle.remove()


def _refuse_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # This hook is also called for other threads, and for methods that are being traced.
    session = current()
    if session is None or session.paused is not None:
        return
    raise TraceError(
        f"{type(optimizer).__name__}.step() in a step, whose Python runs only while it is traced: "
        "parameters would never change",
        loc=caller_location(),
        remedy=_TRAINING_REMEDY,
    )
