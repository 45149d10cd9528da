"""Check torch's own modes while a step is traced and when it runs: one trace, one state.

A trace bakes in the default dtype and the default device, and autocast does not reach into a
compiled step. The gradient mode is part of each call's signature. Modes that act on kernels when
they run (inference mode, deterministic algorithms, the precision of matrix products) need no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch.utils._device import DeviceContext

from ..ir.location import Location
from .errors import TraceError

is_autocast_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
default_dtype: Callable[[], torch.dtype] = torch.get_default_dtype
_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
_mode_at: Callable[[int], object] = torch._C._get_function_stack_at

AUTOCAST = "which does not reach into a compiled step"
AUTOCAST_REMEDY = "enter autocast inside the actor's method"


_HOST = torch.device("cpu")


def default_device() -> torch.device:
    """The device that `torch.set_default_device` or `with device` has set, or else the host."""
    # torch.get_default_device takes microseconds, and CURRENT_DEVICE does not know `with device`.
    count = _mode_count()
    while count:
        count -= 1
        mode = _mode_at(count)
        if type(mode) is DeviceContext:
            return mode.device
    return _HOST


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
            TraceError: autocast is on, or another default dtype or device is set.
        """
        if is_autocast_on():
            raise TraceError(
                f"{shown} is called under torch.autocast, {AUTOCAST}",
                loc=loc,
                remedy=AUTOCAST_REMEDY,
            )
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
