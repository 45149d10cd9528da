"""Do something on each rank; if it fails on one, it fails on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..world.world import world

T = TypeVar("T")


def together(work: Callable[[], T], action: str = "write") -> T:
    """Do something on each rank; if it fails on one, it fails on all. Collective.

    Args:
        action: names the work in messages.

    Returns:
        The result of `work` on this rank.

    Raises:
        OSError, KeyError, ValueError: the error of this rank; or else one of the same type, for the
            first rank that has failed.
    """
    failure: OSError | KeyError | ValueError | None = None
    try:
        result = work()
    except (OSError, KeyError, ValueError) as error:
        failure = error
    words = None if failure is None else (type(failure).__name__, str(failure))
    gathered = world().allgather(words)
    if failure is not None:
        raise failure
    for rank, rank_words in enumerate(gathered):
        if rank_words is not None:
            kind = {"KeyError": KeyError, "ValueError": ValueError}.get(rank_words[0], OSError)
            raise kind(f"rank {rank} could not {action}: {rank_words[1]}")
    return result


def on_rank_0(work: Callable[[], None]) -> None:
    """Do something on rank 0; if it fails there, it fails on all ranks. Collective."""
    together(work if world().rank == 0 else lambda: None)
