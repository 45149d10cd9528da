"""The passes, which rewrite the IR, with their registry and their manager."""

from . import schedules

__all__ = ["schedules"]
