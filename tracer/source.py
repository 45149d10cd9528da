"""Find the user's line: the innermost frame that is neither cg's, torch's nor Python's own."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from importlib.util import find_spec
from types import FrameType, TracebackType

from ..ir.location import Location

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OURS = tuple(
    os.path.join(_PACKAGE, room) + os.sep
    for room in ("ir", "tracer", "passes", "backends", "launch")
)
_COMPILED = os.path.join("build", "mypyc", "source", "cg") + os.sep
"""The folder that tracebacks name for machine code: the copy that `setup.py` compiles."""
_TORCH = find_spec("torch")  # not imported: this module is also used before torch is
_TORCH_FILES = tuple(
    os.path.abspath(room) + os.sep for room in (_TORCH and _TORCH.submodule_search_locations) or ()
)
_NOT_THE_USERS = (*_OURS, _COMPILED, *_TORCH_FILES, sysconfig.get_path("stdlib") + os.sep, "<")


def is_torch_file(file: str) -> bool:
    """True if a source file is part of torch."""
    return file.startswith(_TORCH_FILES)


@functools.cache
def is_user_file(file: str) -> bool:
    """True if a file is part of neither cg, torch nor the standard library.

    Installed packages other than those count as the user's: a line of transformers is a better
    answer than none.
    """
    if "site-packages" in file and not file.startswith(_NOT_THE_USERS):
        return True
    return not file.startswith(_NOT_THE_USERS)


@functools.cache
def is_installed(file: str) -> bool:
    """True if a source file belongs to an installed package."""
    return "site-packages" in file or "dist-packages" in file


@functools.cache
def is_own_file(file: str) -> bool:
    """True if a source file is the user's own, and belongs to no installed package."""
    return not is_installed(file) and is_user_file(file)


def is_our_file(file: str) -> bool:
    """True if a file is part of cg."""
    return file.startswith((*_OURS, _COMPILED))


def caller_location(depth: int = 1) -> Location | None:
    """The user's line that is executing now, or None if no frame is the user's."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename):
            return Location(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return None


def caller_level() -> int:
    """The `stacklevel` by which a warning names the user's line, for the function that warns."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def traceback_location(traceback: TracebackType | None) -> Location | None:
    """The user's innermost line of a traceback, or None."""
    location = None
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_user_file(code.co_filename):
            location = Location(code.co_filename, traceback.tb_lineno, code.co_name)
        traceback = traceback.tb_next
    return location
