"""IR to IR: the passes, their registry and their manager. Importing it registers every pass."""

from . import (
    assign_stages,
    assign_streams,
    check_deadlock,
    check_races,
    check_types,
    cse,
    dce,
    differentiate,
    insert_transfers,
    overlap,
    place,
    plan_buffers,
    schedule,
    split_transfers,
)

__all__ = [
    "assign_stages",
    "assign_streams",
    "check_deadlock",
    "check_races",
    "check_types",
    "cse",
    "dce",
    "differentiate",
    "insert_transfers",
    "overlap",
    "place",
    "plan_buffers",
    "schedule",
    "split_transfers",
]
