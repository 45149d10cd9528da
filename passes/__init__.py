"""IR to IR: the passes, their registry and their manager. Importing it registers every pass."""

from . import (
    assign_stages,
    assign_streams,
    capture,
    check_deadlock,
    check_races,
    check_types,
    choose_transports,
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
    "capture",
    "check_deadlock",
    "check_races",
    "check_types",
    "choose_transports",
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
