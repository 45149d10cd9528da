"""IR to IR: the passes, their registry and their manager."""

from . import schedules

__all__ = ["schedules"]
