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
            raise kind(f"rank {rank} could not {what}: {rank_words[1]}")
    return result


def on_rank_0(work: Callable[[], None], what: str = "write") -> None:
    """Do something on rank 0; where it fails, all ranks do. Collective."""
    together(work if world().rank == 0 else lambda: None, what)
