"""Check torch's own modes while a step is traced and when it runs: one trace, one state.

A trace bakes in the default dtype and the default device, and neither autocast nor a mode of the
user's (`TorchFunctionMode`, `TorchDispatchMode`) reaches into a compiled step. The gradient mode is
part of each call's signature. Modes that act on kernels when they run (inference mode,
deterministic algorithms, the precision of matrix products) need no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..ir.location import Location
from .errors import TraceError

is_autocast_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
default_dtype: Callable[[], torch.dtype] = torch.get_default_dtype
mode_count: Callable[[], int] = torch._C._len_torch_function_stack
_mode_at: Callable[[int], object] = torch._C._get_function_stack_at

_dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack

NO_REACH = "which does not reach into a compiled step"
_REMEDY = "enter {} inside the actor's method"
_KNOWN = ("torch", __name__.partition(".")[0])
"""Packages whose modes leave the values of functions and operators as they are."""


_HOST = torch.device("cpu")


def default_device() -> torch.device:
    """The device that `torch.set_default_device` or `with device` has set, or else the host."""
    # torch.get_default_device takes microseconds, and CURRENT_DEVICE does not know `with device`.
    count = mode_count()
    while count:
        count -= 1
        mode = _mode_at(count)
        if type(mode) is DeviceContext:
            return mode.device
    return _HOST


def entered_mode() -> tuple[str, str] | None:
    """The mode that is on and that no compiled step follows, with a remedy; None if none is.

    Such are autocast, and modes of functions that another package than torch has written: these may
    replace any function.
    """
    if is_autocast_on():
        return "torch.autocast", _REMEDY.format("autocast")
    return _foreign(map(_mode_at, range(mode_count())))


def _foreign(modes: Iterable[object]) -> tuple[str, str] | None:
    """The first of some modes that is of another package, with a remedy; None if none is."""
    for mode in modes:
        kind = type(mode)
        if kind.__module__.partition(".")[0] not in _KNOWN:
            return f"the mode {kind.__qualname__}", _REMEDY.format("the mode")
    return None


@dataclass(frozen=True, slots=True)
class Ambient:
    """The modes under which a step is traced."""

    dtype: torch.dtype
    device: torch.device
    grad: bool

    @staticmethod
    def now() -> Ambient:
        """The modes of this moment."""
        return Ambient(default_dtype(), default_device(), torch.is_grad_enabled())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter these modes inside the `with` block, to trace a step once more."""
        before = default_dtype()
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if default_device() != self.device:
                stack.enter_context(self.device)
            stack.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(self.dtype)
            yield

    def check(self, shown: str, loc: Location | None) -> None:
        """Check that a call of `shown`, at line `loc`, is made under the modes of the step's trace.

        Raises:
            TraceError: autocast or a mode of the user's is on, or another default dtype or device
                is set.
        """
        mode = entered_mode()
        if mode is None and _dispatch_mode_count():  # it would act now, and when the step runs
            mode = _foreign(_get_current_dispatch_mode_stack())
        if mode is not None:
            name, remedy = mode
            reason = f"{shown} is called under {name}, {NO_REACH}"
            raise TraceError(reason, loc=loc, remedy=remedy)
        if default_dtype() is not self.dtype:
            raise _changed(shown, "dtype", self.dtype, default_dtype(), loc)
        if default_device() != self.device:
            raise _changed(shown, "device", self.device, default_device(), loc)


def _changed(
    callee: str, which: str, before: object, now: object, loc: Location | None
) -> TraceError:
    return TraceError(
        f"{callee} is called under the default {which} {now}, and the step began under {before}; "
        f"a compiled step has one default {which}",
        loc=loc,
        remedy=f"set the default {which} before the step, and name the {which} where one call "
        "needs another, or set it inside the actor's method",
    )
