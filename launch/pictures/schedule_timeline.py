"""A schedule on paper as a picture. Needs neither torch nor programs."""

from __future__ import annotations

from ...ir.attributes import Action, Task
from ...ir.pipeline.timing import Timeline
from .model import KIND_OF, NUDGE, End, Picture, TimeSlice, TrackKey, lay_out

_NAMES = {
    Action.FORWARD: "forward",
    Action.BACKWARD: "backward",
    Action.WEIGHT: "weight gradient",
}
_NEXT_STAGE = {Action.FORWARD: 1, Action.BACKWARD: -1}


def picture_of_schedule(timeline: Timeline, title: str, note: str = "") -> Picture:
    """A schedule on paper: a row for each rank, a box for each task, arrows between ranks."""
    slices: dict[TrackKey, list[TimeSlice]] = {}
    ends: dict[Task, tuple[TrackKey, float, float]] = {}
    for rank in timeline.rows:
        key = TrackKey(rank)
        stages = [stage for stage, home in enumerate(timeline.stage_ranks) if home == rank]
        chunks = {stage: chunk for chunk, stage in enumerate(stages)}
        slices[key] = []
        for task, start, end in timeline.tasks(rank):
            ends[task] = (key, start, end)
            slices[key].append(_task_slice(task, start, end, chunks[task.stage]))
    return lay_out(title, note, timeline.rows, slices, _task_arrows(ends))


def _task_slice(task: Task, start: float, end: float, chunk: int) -> TimeSlice:
    mb = task.microbatch
    name = f"{task}: {_NAMES[task.action]} of microbatch {mb} on stage {task.stage}"
    kind = KIND_OF[task.action]
    return TimeSlice(start, end, kind, name, str(mb), str(task), microbatch=mb, chunk=chunk)


def _task_arrows(ends: dict[Task, tuple[TrackKey, float, float]]) -> list[tuple[End, End]]:
    arrows: list[tuple[End, End]] = []
    for task, (key, _, end) in ends.items():
        if task.action in _NEXT_STAGE:
            step = _NEXT_STAGE[task.action]
            next_ends = ends.get(Task(task.stage + step, task.action, task.microbatch))
            if next_ends is not None and next_ends[0] != key:
                arrows.append(((key, end - NUDGE), (next_ends[0], next_ends[1])))
    return arrows
