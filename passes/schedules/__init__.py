"""Pipeline schedules: pure functions from a pipeline to each rank's order of tasks.

To write a schedule, put such a function into a `Schedule`, or give a `table` of tasks. Every order
goes through `validate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...ir.attributes import Task
from ...ir.pipeline.costs import Costs
from ...ir.pipeline.order import Order, splits_backward
from ...ir.text.files import read_text
from .orders.base import Pipeline, Schedule, validate
from .orders.dualpipe_v_order import dualpipe_v_order
from .orders.gpipe_order import gpipe_order
from .orders.interleaved_order import interleaved_order
from .orders.looped_bfs_order import looped_bfs_order
from .orders.one_f_one_b_order import one_f_one_b_order
from .orders.text_table import format_table, parse_table, table_order, table_pipeline
from .orders.zb_h1_order import zb_h1_order
from .orders.zb_h2_order import zb_h2_order
from .orders.zb_v_order import zb_v_order
from .search.auto_order import auto_order, auto_orders
from .search.find_orders import CHOICES, Found

__all__ = [
    "Found",
    "Order",
    "Pipeline",
    "Schedule",
    "Task",
    "validate",
    "gpipe",
    "one_f_one_b",
    "interleaved",
    "looped_bfs",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "dualpipe_v",
    "auto",
    "candidates",
    "found_orders",
    "table",
    "table_pipeline",
    "from_file",
    "format_table",
    "by_name",
    "names",
]


def gpipe() -> Schedule:
    """All forwards, then all backwards: simple, but holds the activations of all microbatches."""
    return Schedule("gpipe", gpipe_order)


def one_f_one_b() -> Schedule:
    """One forward, one backward: as fast as GPipe, in the memory of p microbatches on p ranks."""
    return Schedule("1f1b", one_f_one_b_order)


def interleaved(chunks: int | None = None) -> Schedule:
    """1F1B over several chunks on each rank (None: any number), for a smaller bubble."""
    return Schedule("interleaved", interleaved_order, (("chunks", chunks),))


def looped_bfs(chunks: int | None = None) -> Schedule:
    """GPipe over several chunks on each rank (None: any number), with few, large gradient sums."""
    return Schedule("looped-bfs", looped_bfs_order, (("chunks", chunks),))


def zb_h1() -> Schedule:
    """1F1B with W in its gaps: a third of the bubble at equal times, in the same memory."""
    return Schedule("zb-h1", zb_h1_order, splits=True)


def zb_h2() -> Schedule:
    """No bubble at equal times, in twice the memory of 1F1B."""
    return Schedule("zb-h2", zb_h2_order, splits=True)


def zb_v() -> Schedule:
    """No bubble at equal times, in the memory of 1F1B, for stages down the ranks and up again."""
    return Schedule("zb-v", zb_v_order, splits=True)


def dualpipe_v() -> Schedule:
    """Forwards and backwards in pairs that hide communication, for stages as in `zb_v`."""
    return Schedule("dualpipe-v", dualpipe_v_order, splits=True)


def auto(
    max_activations: float | None = None,
    costs: Costs | None = None,
    *,
    max_bytes: float | tuple[float, ...] | None = None,
    seed: int = 0,
    seconds: float | None = None,
    measure: bool | str | Path = False,
    splits: bool = True,
    remat: bool = False,
) -> Schedule:
    """The fastest order that a search finds in a given memory.

    `found_orders` gives the orders with a lower bound.

    Args:
        max_activations: the most microbatches whose activations a rank may hold at once; None: as
            many as there are ranks, which is what 1F1B holds.
        costs: the costs of tasks and transfers. None: all tasks take the same time, and transfers
            take none. If costs are given, a step is compiled with each of the best orders, and the
            order stays whose programs are the fastest on paper. There, transfers may also wait for
            their receiver and for each other, which the search leaves out.
        max_bytes: instead of `max_activations`, the most bytes of activations that a rank may
            hold: one number, or one for each rank, in the order in which a microbatch first comes
            to them. On paper the costs must have `activation_bytes`, and may have `weight_bytes`;
            `compile` measures both.
        seed: the seed of the search's random moves. The same seed gives the same order everywhere.
        seconds: the time of the search. None: the number of tried orders depends only on the size
            of the pipeline. With a time, the order depends on the machine: ranks may find different
            orders, which compiling refuses.
        measure: whether to measure the costs when a step is compiled, by running it on all ranks
            with the arguments of `lower`; its changes to actors are undone. A path names a file
            that the costs are kept in, and read from if it exists. Not together with `costs`.
        splits: whether an order may have W, so that backwards are compiled in two halves.
        remat: whether to choose stages that recompute, as by `cg.remat`, if memory is too small for
            their activations. On paper the costs must have `mr`; `compile` measures it, and traces
            the step again.

    Raises:
        ValueError: both `costs` and `measure` are given.

    If a step's backwards must follow all its forwards, there is no order to search for. Such a step
    is compiled with `gpipe`, with a warning, unless `max_activations` is given.
    """
    options = (
        ("max_activations", max_activations),
        ("costs", costs),
        ("max_bytes", max_bytes),
        ("seed", seed),
        ("seconds", seconds),
        ("measure", str(measure) if isinstance(measure, Path) else measure),
        ("splits", splits),
        ("remat", remat),
    )
    if measure and costs is not None:
        raise ValueError("schedule 'auto': give costs, or have them measured, not both")
    return Schedule("auto", auto_order, options, splits)


def found_orders(schedule: Schedule, pipeline: Pipeline) -> tuple[Found, ...]:
    """The orders that the search of `auto` finds for a pipeline, best first, with the bound.

    Raises:
        ValueError: the schedule does not search, or its memory is too small.
    """
    if not is_search(schedule):
        raise ValueError(f"schedule '{schedule.name}' does not search")
    options = dict(schedule.options)
    options.pop("choice", None)
    options.pop("measure", None)
    return auto_orders(pipeline, **options)


def is_search(schedule: Schedule) -> bool:
    """True if a schedule searches for an order, as `auto` does."""
    return schedule.order is auto_order


def candidates(schedule: Schedule) -> tuple[Schedule, ...]:
    """Schedules for the best orders of a search with costs, best first; else the schedule alone."""
    options = dict(schedule.options)
    if not is_search(schedule) or options["costs"] is None or "choice" in options:
        return (schedule,)
    return tuple(
        replace(schedule, options=(*schedule.options, ("choice", choice)))
        for choice in range(CHOICES)
    )


def table(text: str, name: str = "table") -> Schedule:
    """The schedule that a text spells out: a line for each rank, tasks as in `2F0 1B3 0W3`.

    It is for one pipeline only, with these stages and microbatches. The lines are for ranks 0, 1,
    ... in turn, or begin with their rank: `2: 2F0 2B0`. Blanks or commas separate tasks; a comment
    goes from a `#` to the end of its line. A grid from a dump is a table, too.

    Raises:
        ValueError: the text is not a table; the message names the line.
    """
    splits = splits_backward(parse_table(text, name))
    return Schedule(name, table_order, (("text", text), ("file", name)), splits)


def from_file(path: str | Path) -> Schedule:
    """The schedule that a text file spells out, in the form that `table` reads.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a table; the message names the line.
    """
    return table(read_text(path), str(path))


_FACTORIES: dict[str, Callable[[], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
    "auto": auto,
}


def names() -> list[str]:
    """The names of all schedules that need no arguments, as `by_name` takes them."""
    return list(_FACTORIES)


def by_name(name: str) -> Schedule:
    """The schedule called `name`.

    Raises:
        ValueError: there is no such schedule; the message lists all names.
    """
    if name not in _FACTORIES:
        raise ValueError(f"there is no schedule '{name}'; choose from {', '.join(_FACTORIES)}")
    return _FACTORIES[name]()
