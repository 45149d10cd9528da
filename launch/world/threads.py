"""Holds a rank's thread pools to its share of the cores; ranks on one machine add up otherwise."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from ..config import THREAD_VARIABLES, export


def settings(threads: int, preset: Collection[str]) -> dict[str, str]:
    """The variables to set so that thread pools which are yet to be loaded get `threads` threads.

    Args:
        threads: threads for each pool, at least 1.
        preset: variables that are set already. If OMP_NUM_THREADS is among them, the user has
            chosen, and nothing is set.
    """
    if "OMP_NUM_THREADS" in preset:
        return {}
    return {name: str(threads) for name in THREAD_VARIABLES if name not in preset}


def cap(threads: int, preset: Collection[str]) -> None:
    """Hold the thread pools of this process to `threads`, whether or not torch is loaded.

    Args:
        threads: threads for each pool, at least 1.
        preset: variables that the user has set; see `settings`.
    """
    chosen = settings(threads, preset)
    if not chosen:
        return
    export(chosen)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
