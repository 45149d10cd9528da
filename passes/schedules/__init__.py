"""Pipeline schedules: pure functions from a pipeline to each rank's order of tasks."""

from __future__ import annotations

from collections.abc import Callable

from .base import Order, Pipeline, Schedule, validate
from .gpipe_order import gpipe_order
from .one_f_one_b_order import one_f_one_b_order

__all__ = ["Order", "Pipeline", "Schedule", "by_name", "gpipe", "one_f_one_b", "validate"]


def gpipe() -> Schedule:
    """All forwards, then all backwards: simple, and holds every microbatch's activations."""
    return Schedule("gpipe", gpipe_order)


def one_f_one_b() -> Schedule:
    """One forward, one backward: as fast as GPipe, with at most one activation per rank ahead."""
    return Schedule("1f1b", one_f_one_b_order)


_FACTORIES: dict[str, Callable[[], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def by_name(name: str) -> Schedule:
    """The schedule called `name`.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in _FACTORIES:
        raise ValueError(f"there is no schedule '{name}'; choose from {', '.join(_FACTORIES)}")
    return _FACTORIES[name]()
