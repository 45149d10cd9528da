"""Pictures of schedules as their documentation has them: a column for each unit of time."""

from __future__ import annotations

from cg.ir.attributes import Action
from cg.ir.pipeline.timing import play
from cg.passes.schedules import Pipeline, Schedule

FIRST = {Action.FORWARD: "0", Action.BACKWARD: "a", Action.WEIGHT: "A"}


def picture(schedule: Schedule, pipeline: Pipeline) -> str:
    """F of microbatches 0, 1, ... as `0`, `1`, ...; B as `a`, `b`, ...; W as `A`, `B`, ...

    Every task takes one unit, B without W two. A rank has a line for each of its stages, which are
    blank where another of its stages runs, and dots where the rank is idle.
    """
    timeline = play(schedule(pipeline), pipeline.stage_ranks, pipeline.microbatches)
    width = round(timeline.end)
    lines = []
    for rank in pipeline.ranks:
        stages = [s for s, home in enumerate(pipeline.stage_ranks) if home == rank]
        rows = {stage: ["."] * width for stage in stages}
        for task, start, end in timeline.tasks(rank):
            for column in range(round(start), round(end)):
                for stage in stages:
                    letter = chr(ord(FIRST[task.action]) + task.microbatch)
                    rows[stage][column] = letter if stage == task.stage else " "
        for stage in stages:
            label = f"rank {rank}" if stage == stages[0] else " " * 6
            lines.append(f"{label}  {''.join(rows[stage])}".rstrip())
    return "\n".join(lines)
