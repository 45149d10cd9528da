"""The version of cg as its sources have it: a checkout changes without a new number."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_ROOMS = ("ir", "tracer", "passes", "backends", "launch")


@functools.cache
def source_digest() -> str:
    """A digest of the names, sizes and times of cg's modules, and of the version of Python.

    Python itself goes by size and time where it takes a module's code from an earlier start.
    """
    lines = [sys.version]
    for room in _ROOMS:
        lines += sorted(_described(os.fspath(_ROOT / room)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _described(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((".py", ".so")):
                status = entry.stat()
                yield f"{entry.path} {status.st_size} {status.st_mtime_ns}"
            elif entry.name != "__pycache__" and entry.is_dir():
                yield from _described(entry.path)
