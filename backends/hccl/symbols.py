"""Find HCCL on this machine, and its functions in it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import CDLL, c_int32
from pathlib import Path
from typing import Any

from ..errors import TransportError
from .abi import ESSENTIAL, LAYOUTS, PROTOTYPES, RETURNS, check_layouts

FOLDERS = (
    "/usr/local/Ascend/cann/lib64",
    "/usr/local/Ascend/ascend-toolkit/latest/lib64",
)
"""The usual folders of CANN: from version 8.5 on, and before."""

LIBRARIES = ("libhccl.so", "libhcomm.so")
"""Newer CANN has taken the management of communicators out of the first into the second."""


class Symbols:
    """The functions that this version of HCCL has.

    Attributes:
        path: of the library, or its name where the system has found it by that.
    """

    def __init__(self, path: str, libraries: Sequence[CDLL]) -> None:
        self.path = path
        self._functions: dict[str, Any] = {}
        for name, takes in PROTOTYPES.items():
            function = next(
                (f for library in libraries if (f := getattr(library, name, None))), None
            )
            if function is not None:
                function.argtypes = takes
                function.restype = RETURNS.get(name, c_int32)
                self._functions[name] = function

    def has(self, name: str) -> bool:
        """True if this version of HCCL has a function."""
        return name in self._functions

    def missing(self) -> list[str]:
        """The functions that this version lacks."""
        return [name for name in PROTOTYPES if name not in self._functions]

    def get(self, name: str) -> Callable[..., Any]:
        """A function of HCCL; if this version lacks it, one that raises an error with its name."""
        function = self._functions.get(name)
        return function if function is not None else self._lacking(name)

    def _lacking(self, name: str) -> Callable[..., Any]:
        def fail(*_: Any) -> Any:
            raise TransportError(
                f"HCCL in {self.path} has no {name}, so what needs it is not supported: install a "
                "newer CANN, or let the value take another way by cg.via(x, 'cpu')"
            )

        return fail


def load(path: str | None = None, folders: Sequence[str] = FOLDERS) -> Symbols:
    """Load HCCL.

    Args:
        path: of `libhccl.so`; if None it is looked for by its name, as the system does
            (LD_LIBRARY_PATH, which CANN's `set_env.sh` sets), then in `folders`.

    Raises:
        TransportError: it cannot be loaded, or lacks what every use needs.
    """
    check_layouts(LAYOUTS)
    places = [path] if path is not None else [LIBRARIES[0], *(f"{f}/libhccl.so" for f in folders)]
    problems = []
    for place in places:
        try:
            first = CDLL(place)
        except OSError as error:
            problems.append(f"  {place}: {error}")
            continue
        return _checked(Symbols(place, [first, *_second(place)]))
    raise TransportError(
        "tensors on NPUs travel by HCCL, and it cannot be loaded:\n"
        + "\n".join(problems)
        + "\nInstall CANN and source its set_env.sh, set HCCL_SO_PATH to the libhccl.so to use, or "
        "keep the step on the CPU by CG_DEVICE=cpu"
    )


def _second(place: str) -> list[CDLL]:
    """The library beside the first, if this version of CANN has one."""
    beside = Path(place).with_name(LIBRARIES[1])
    name = str(beside) if beside.exists() else LIBRARIES[1]
    try:
        return [ctypes.CDLL(name)]
    except OSError:
        return []  # older versions have all in one


def _checked(symbols: Symbols) -> Symbols:
    lacking = [name for name in ESSENTIAL if not symbols.has(name)]
    if lacking:
        raise TransportError(
            f"{symbols.path} is not HCCL, or one that cg does not know: it has no "
            f"{', '.join(lacking)}. Set HCCL_SO_PATH to the libhccl.so of CANN"
        )
    return symbols
