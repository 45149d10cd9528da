"""Statistics of executions: counts, times and the bubble."""

from __future__ import annotations

from statistics import median

from .tallies import Tally


class Statistics(Tally):
    """Times of the executions that have ended, in seconds; equal if all figures are.

    An execution's *total* is the time from its start to its end on this rank, its *blocked* time
    what it waited of that for other ranks. In a virtual world, where one process plays every rank,
    that includes the other ranks' work.

    Attributes:
        executions: how many have ended.
        failures: how many of them have failed, as far as the rank has learnt of it.
        total, blocked: of all of them together.
        recent: total and blocked of each of the last 256, the latest at the end.
    """

    @property
    def last_total(self) -> float:
        """Of the last execution; 0 before there is one."""
        return self.recent[-1][0] if self.recent else 0.0

    @property
    def last_blocked(self) -> float:
        """Of the last execution; 0 before there is one."""
        return self.recent[-1][1] if self.recent else 0.0

    @property
    def median_total(self) -> float:
        """Of the last 256 executions; 0 before there is one."""
        return median(total for total, _ in self.recent) if self.recent else 0.0

    @property
    def median_blocked(self) -> float:
        """Of the last 256 executions; 0 before there is one."""
        return median(blocked for _, blocked in self.recent) if self.recent else 0.0

    @property
    def bubble(self) -> float:
        """The share of the time that the rank has waited, from 0 to 1."""
        return self.blocked / self.total if self.total else 0.0

    @property
    def last_bubble(self) -> float:
        """The same of the last execution."""
        return self.last_blocked / self.last_total if self.last_total else 0.0

    def __add__(self, other: Statistics) -> Statistics:
        """Both together; those of `other` are the later ones."""
        both = Statistics()
        for statistics in (self, other):
            both.executions += statistics.executions
            both.total += statistics.total
            both.blocked += statistics.blocked
            both.failures += statistics.failures
            both.recent.extend(statistics.recent)
        return both

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Statistics):
            return NotImplemented
        return self._figures() == other._figures()

    __hash__ = None  # type: ignore[assignment] # that of a running step changes

    def _figures(self) -> tuple[int, int, float, float, list[tuple[float, float]]]:
        return self.executions, self.failures, self.total, self.blocked, list(self.recent)

    def __repr__(self) -> str:
        return (
            f"Statistics(executions={self.executions}, failures={self.failures}, "
            f"total={self.total:g}, blocked={self.blocked:g})"
        )
