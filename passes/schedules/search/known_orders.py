"""The known schedules that a search begins with, and variants for a line of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ....ir.pipeline.order import Order, TaskRow
from ..orders.base import Pipeline, ScheduleError, spell
from ..orders.dualpipe_v_order import dualpipe_v_order
from ..orders.gpipe_order import gpipe_order
from ..orders.interleaved_order import interleaved_order
from ..orders.looped_bfs_order import looped_bfs_order
from ..orders.one_f_one_b_order import one_f_one_b_order
from ..orders.zb_h1_order import lagging, zb_h1_order
from ..orders.zb_h2_order import zb_h2_order
from ..orders.zb_v_order import zb_v_order
from .bound import lags
from .problem import ROUNDING, OrderProblem

_KNOWN: dict[str, Callable[[Pipeline], Order]] = {
    "1f1b": one_f_one_b_order,
    "zb-h1": zb_h1_order,
    "zb-h2": zb_h2_order,
    "zb-v": zb_v_order,
    "dualpipe-v": dualpipe_v_order,
    "interleaved": interleaved_order,
    "looped-bfs": looped_bfs_order,
    "gpipe": gpipe_order,
}
_BEST = ("zb-h1", "zb-h2", "zb-v", "interleaved")
"""The schedules that are tried if playing an order takes long; others are hardly ever better."""


def known_orders(problem: OrderProblem, few: bool = False) -> Iterator[tuple[str, Order]]:
    """The known schedules that the ranks of the stages allow, by name, whatever memory they take.

    Args:
        problem: the pipeline, its times and its memory.
        few: whether to leave out schedules that are hardly ever the best.
    """
    pipeline = problem.pipeline
    for name, rule in _KNOWN.items():
        if (few and name not in _BEST) or (name != "1f1b" and not (problem.split or _whole(name))):
            continue
        try:
            yield name, rule(pipeline)
        except ScheduleError:
            continue
    if not problem.split or problem.parts != problem.ranks:
        return
    yield "filled warm-up", _filled(problem)
    if few:
        return
    # 1F1B with split backwards, W at once or put off, and as many forwards ahead as fit.
    room = int(min(memory_in_microbatches(problem), 2 * problem.parts))
    for put_off in (0, problem.parts):
        words = []
        for at in range(problem.parts):
            warm_up = min(problem.parts - at, room)
            words.append((warm_up, min(at, put_off, room - warm_up)))
        yield "1f1b with W", _lagging(problem, words)


def _whole(name: str) -> bool:
    return name in ("1f1b", "interleaved", "looped-bfs", "gpipe")


def memory_in_microbatches(problem: OrderProblem) -> float:
    """The number of microbatches that fit on all parts of every rank."""
    count = float(problem.microbatches)
    for rank, parts in enumerate(problem.hosted):
        size = sum(problem.grows[k] for k in parts)
        if size:
            room = problem.capacities[rank] - problem.reserve(rank)
            count = min(count, room / size * (1.0 + ROUNDING))
    return count


def _filled(problem: OrderProblem) -> Order:
    """Fill the time before the first B with forwards, and that after the last B with W.

    This is ZB-H2 for any times and any memory. The forwards ahead fill the time until the first B
    is back, and the W that are put off fill the time that is left after the last B, both as far as
    memory allows.
    """
    n, m = problem.parts, problem.microbatches
    times = problem.durations
    _, up = lags(problem)
    back = [0.0] * n
    clock = times[n - 1]
    for k in reversed(range(n)):
        back[k] = clock
        clock += times[n + k] + up[k]
    left = [times[2 * n]] * n
    for k in range(1, n):
        left[k] = max(left[k - 1] + times[n + k - 1] + up[k], times[2 * n + k])
    rooms = []
    for k in range(n):
        size, rank = problem.grows[k], problem.rank_of[k]
        room = problem.capacities[rank] - problem.reserve(rank)
        rooms.append(room / size * (1.0 + ROUNDING) if size else float(m))
    ahead = [1] * n
    for k in reversed(range(n)):
        tf = times[k]
        filling = max(back[k] / tf if tf else m, ahead[min(k + 1, n - 1)])
        ahead[k] = max(1, int(min(rooms[k], m, filling)))
    words = []
    for k in range(n):
        if k:
            # One fewer from rank to rank: otherwise a B would wait for an F that waits for the
            # next B.
            ahead[k] = max(1, min(ahead[k], ahead[k - 1] - 1))
        tw = times[2 * n + k]
        lag = left[k] / tw if tw else 0.0
        if problem.kept[k]:
            lag = min(lag, (rooms[k] - ahead[k]) / problem.kept[k])
        words.append((ahead[k], int(min(lag, m))))
    return _lagging(problem, words)


def _lagging(problem: OrderProblem, words: list[tuple[int, int]]) -> Order:
    """The order of a line of parts, with a warm-up of forwards and a lag of W for each part."""
    pipeline = problem.pipeline
    order: dict[int, TaskRow] = {}
    for part, (warm_up, lag) in zip(pipeline.parts, words, strict=True):
        word = lagging(pipeline.microbatches, warm_up, lag)
        order[pipeline.stage_ranks[part[0]]] = spell(pipeline, [part], word)
    return order
