"""Room for Python's frames, so that deep calls do not ask the system for memory again and again.

CPython keeps the frames of a thread in chunks of 16 KiB. A call that does not fit in the last chunk
maps another one, and its return unmaps that. A loop that happens to run at the end of a chunk does
so for each call in it: the traces of a chain of four layers did 100,000 times, in a tenth of their
time. A frame that is larger than a chunk gets a chunk of the next power of two, and the frames of
all that it calls lie behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_SLOTS = 1 << 17
"""Pointers of a frame: 1 MiB, in a chunk of 2 MiB. Of both, only pages that are used are real."""


def with_frame_room(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function from which many calls go deep: they find room in one chunk."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_SLOTS)
    return functools.wraps(function)(call)
