"""Draw a scheduled module as text: a line for each rank, a column for each unit of time."""

from __future__ import annotations

from ...ir.attributes import Task
from ...ir.ops import Call, Op
from ...ir.ops.module import Module
from ...ir.verify.communication import Progress


def format_grid(module: Module) -> str:
    """Draw the tasks of a scheduled module as they would run if each took one unit of time.

    Communication and work outside of tasks take no time here. A `.` is a unit in which a rank has
    no task::

        rank 0 | 0F0 0F1 .   0B0 0B1
        rank 1 | .   1F0 1B0 1F1 1B1

    Raises:
        IRError: the two ends of a message do not agree.
    """
    closing = _closing_calls(module)
    progress = Progress(module, lambda op: 1.0 if id(op) in closing else 0.0)
    progress.run()
    rows: dict[int, dict[int, str]] = {rank: {} for rank in sorted(progress.programs)}
    for span in progress.spans:
        rows[span.rank][round(span.start)] = str(span.op.task)
    columns = max((round(span.end) for span in progress.spans), default=0)
    width = max((len(text) for row in rows.values() for text in row.values()), default=1)
    label = len(str(max(rows)))
    lines = []
    for rank, row in rows.items():
        cells = " ".join(row.get(column, ".").ljust(width) for column in range(columns))
        lines.append(f"rank {rank:>{label}} | {cells}".rstrip())
    return "\n".join(lines) + "\n"


def _closing_calls(module: Module) -> set[int]:
    """The identities of the last call of each task, which stands for the whole task."""
    closing: set[int] = set()
    for program in module.programs:
        last: dict[Task, Op] = {}
        for op in program.ops:
            if isinstance(op, Call) and op.task is not None:
                function = module.functions[op.fn.name]
                if function.parameter is not None:
                    continue
                if function.actor is not None or op.task not in last:
                    last[op.task] = op
        closing.update(id(op) for op in last.values())
    return closing
