"""Describe the failure of a device once, in words, instead of the raw error that ends a program.

The host learns of the failure where it next asks the device for something: mostly where the program
reads a number that a step returned. The traceback to that line says nothing of the cause.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ...backends.devices.programs.watchdog import fault_of
from ..job.failure import whereabouts

_is_installed = False


def say_faults(end_job: Callable[[str], None]) -> None:
    """Let an uncaught error of a failed device end the job by its description; once for a process.

    Args:
        end_job: the world's method.
    """
    global _is_installed
    if not _is_installed:
        _is_installed = True
        sys.excepthook = _hook(sys.excepthook, end_job)


ExceptionHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _hook(previous: ExceptionHook, end_job: Callable[[str], None]) -> ExceptionHook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        fault = fault_of(error)
        if fault is None:
            previous(kind, error, trace)
            return
        line = whereabouts(error)
        end_job(f"{fault}" + (f"\nThe program has come upon it{line}" if line else ""))

    return hook
