"""Check how stages lie on ranks, for schedules that need a certain arrangement."""

from __future__ import annotations

from .base import Pipeline, ScheduleError

Chunks = list[tuple[int, ...]]
"""The stages of each chunk that a rank hosts."""


def line(pipeline: Pipeline, name: str) -> list[tuple[int, ...]]:
    """The stages of each rank, down the pipeline, if each rank hosts neighbouring stages.

    Raises:
        ScheduleError: a rank hosts stages that are not neighbours.
    """
    parts = pipeline.parts
    if len(parts) != len(pipeline.ranks):
        raise ScheduleError(
            f"schedule '{name}' wants the stages of a rank side by side, but they lie on ranks "
            f"{_spell(pipeline)}; move them, or use 1f1b or auto"
        )
    return list(parts)


def loop(pipeline: Pipeline, chunks: int | None, name: str) -> list[Chunks]:
    """The chunks of each rank, if the pipeline goes round the ranks several times.

    Args:
        pipeline: the pipeline.
        chunks: how often it must go round; None: any number.
        name: the name of the schedule, for errors.

    Raises:
        ScheduleError: it does not go round all ranks in the same order, or not `chunks` times.
    """
    ranks = pipeline.ranks
    # With one rank the ends of rounds are not visible, so each stage counts as a round.
    parts = pipeline.parts if len(ranks) > 1 else tuple((s,) for s in range(pipeline.stages))
    rounds = len(parts) // len(ranks)
    homes = tuple(pipeline.stage_ranks[part[0]] for part in parts)
    count = rounds if chunks is None else chunks
    if homes != ranks * count:
        many = "chunks" if chunks is None else f"{chunks} chunk{'s' * (chunks != 1)}"
        sum_ = "" if chunks is None else f", {chunks * len(ranks)} stages"
        raise ScheduleError(
            f"schedule '{name}' wants {many} on each of {len(ranks)} ranks{sum_}, that go round "
            f"the ranks as in 0,1,0,1; but the stages lie on ranks {_spell(pipeline)}"
        )
    return [[parts[turn * len(ranks) + at] for turn in range(rounds)] for at in range(len(ranks))]


def vee(pipeline: Pipeline, name: str) -> list[Chunks]:
    """The two chunks of each rank, if the pipeline goes down the ranks and up again.

    Raises:
        ScheduleError: the pipeline does not.
    """
    ranks = pipeline.ranks
    if pipeline.stage_ranks != ranks + ranks[::-1]:
        raise ScheduleError(
            f"schedule '{name}' wants 2 stages on each of {len(ranks)} ranks, "
            f"{2 * len(ranks)} stages, that go down the ranks and up again as in 0,1,1,0; but the "
            f"stages lie on ranks {_spell(pipeline)}"
        )
    last = pipeline.stages - 1
    return [[(at,), (last - at,)] for at in range(len(ranks))]


def _spell(pipeline: Pipeline) -> str:
    return ",".join(map(str, pipeline.stage_ranks))
