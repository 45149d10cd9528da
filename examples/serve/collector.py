"""Keep Python's garbage collector from holding up steps while variants are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 2**31 - 1
"""A number of collections of the middle generation that no compiler comes to."""


@contextmanager
def old_objects_unvisited() -> Iterator[None]:
    """Have Python's collector leave out the oldest generation inside of the `with` block.

    A compiler makes a few hundred thousand objects. To visit them all takes a tenth of a second,
    in which no thread goes on.
    """
    young, middle, oldest = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, oldest)


def settle() -> None:
    """Collect garbage, and have Python's collector visit no more what is left.

    A variant is tens of thousands of objects that stay. Collections of the oldest generation would
    visit those of all variants in the middle of a step.
    """
    gc.collect()
    gc.freeze()
