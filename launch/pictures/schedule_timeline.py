"""A schedule on paper as a picture. Needs neither torch nor programs."""

from __future__ import annotations

from ...ir.attributes import Action, Task
from ...ir.pipeline.timing import Timeline
from .model import KIND_OF, NUDGE, Arrow, Picture, Row, Slice, Spot, Track


def picture_of_schedule(timeline: Timeline, title: str, note: str = "") -> Picture:
    """A schedule on paper: a row for each rank, a box for each task, arrows between ranks."""
    ranks = sorted(timeline.rows)
    rows = []
    ends: dict[Task, tuple[int, float, float]] = {}
    for index, rank in enumerate(ranks):
        slices = []
        stages = [stage for stage, home in enumerate(timeline.stage_ranks) if home == rank]
        chunks = {stage: chunk for chunk, stage in enumerate(stages)}
        for task, start, end in timeline.tasks(rank):
            ends[task] = (index, start, end)
            slices.append(_task_slice(task, start, end, chunks[task.stage]))
        rows.append(Row(rank, (Track("compute", tuple(slices)),)))
    return Picture(title, tuple(rows), note, tuple(_task_arrows(ends)))


def _task_slice(task: Task, start: float, end: float, chunk: int) -> Slice:
    action = {Action.FORWARD: "forward", Action.BACKWARD: "backward"}.get(
        task.action, "weight gradient"
    )
    name = f"{task}: {action} of microbatch {task.microbatch} on stage {task.stage}"
    mb = task.microbatch
    kind = KIND_OF[task.action]
    return Slice(start, end, kind, name, str(mb), str(task), microbatch=mb, chunk=chunk)


def _task_arrows(ends: dict[Task, tuple[int, float, float]]) -> list[Arrow]:
    arrows = []
    steps = {Action.FORWARD: 1, Action.BACKWARD: -1}
    for task, (row, _, end) in ends.items():
        step = steps.get(task.action)
        if step is None:
            continue
        other = ends.get(Task(task.stage + step, task.action, task.microbatch))
        if other is not None and other[0] != row:
            arrows.append(Arrow(Spot(row, 0, end - NUDGE), Spot(other[0], 0, other[1])))
    return arrows
