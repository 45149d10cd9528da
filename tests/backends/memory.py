"""The memory that torch takes while something runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch


def peak_of(run: Callable[[], object]) -> int:
    """The most bytes that torch holds at once of what it takes while something runs."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    taken: Any = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    return max(itertools.accumulate(e.nbytes() for e in taken if e.name() == "[memory]"))
