"""IR to IR: the passes, their registry and their manager. Importing it registers every pass."""

from .check import check_deadlock, check_races
from .frontend import check_types, cse, dce, differentiate, fuse, fuse_accumulation
from .lower import assign_streams, batch_messages, capture, overlap, plan_buffers
from .order import assign_stages, schedule
from .placement import choose_transports, insert_transfers, place, split_transfers

__all__ = [
    "assign_stages",
    "assign_streams",
    "batch_messages",
    "capture",
    "check_deadlock",
    "check_races",
    "check_types",
    "choose_transports",
    "cse",
    "dce",
    "differentiate",
    "fuse",
    "fuse_accumulation",
    "insert_transfers",
    "overlap",
    "place",
    "plan_buffers",
    "schedule",
    "split_transfers",
]
