"""Do something on each rank; where one fails, all do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..world.world import world

T = TypeVar("T")


def together(work: Callable[[], T], what: str = "write") -> T:
    """Do something on each rank; where one fails, all do. Collective.

    Args:
        what: the ranks do, in a word, for messages.

    Raises:
        OSError, KeyError, ValueError: what has been raised here; or else, as the first that another
            rank has raised.
    """
    failed: OSError | KeyError | ValueError | None = None
    try:
        made = work()
    except (OSError, KeyError, ValueError) as error:
        failed = error
    words = None if failed is None else (type(failed).__name__, str(failed))
    told = world().allgather(words)
    if failed is not None:
        raise failed
    for rank, theirs in enumerate(told):
        if theirs is not None:
            kind = {"KeyError": KeyError, "ValueError": ValueError}.get(theirs[0], OSError)
            raise kind(f"rank {rank} could not {what}: {theirs[1]}")
    return made


def on_rank_0(work: Callable[[], None], what: str = "write") -> None:
    """Do something on rank 0; where it fails, all ranks do. Collective."""
    together(work if world().rank == 0 else lambda: None, what)
