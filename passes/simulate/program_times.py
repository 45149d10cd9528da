"""The times of the ranks of a step, either simulated or recorded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...ir.verify.communication import TimeSpan


@dataclass(frozen=True, slots=True)
class RankTimes:
    """The times of one rank, in milliseconds.

    Attributes:
        rank: the rank.
        start, end: the start of its first work and the end of its last; both 0 if it has none.
        busy: the time for which it works.
        blocked: the time between `start` and `end` for which it does not work.
        exposed: the part of `blocked` in which the awaited message is travelling; in the rest, it
            has not been sent yet. NaN if this is not known.
        peak_bytes: the most bytes of tensors that it holds, by the buffer plan: `MemoryPlan.peak`.
    """

    rank: int
    start: float
    end: float
    busy: float
    blocked: float
    exposed: float
    peak_bytes: int = 0

    @property
    def span(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class ProgramTimes:
    """The times of all programs of a step; `print` shows them as a table.

    Attributes:
        ranks: the times of each rank.
        spans: the spans of all ops that take time, by rank, in program order.
    """

    ranks: tuple[RankTimes, ...]
    spans: tuple[TimeSpan, ...]

    @property
    def comparable_makespan(self) -> float:
        """The makespan to nine digits, which programs of equal times have in common.

        It is a sum of the same numbers in other orders, so equal ones may differ a little.
        """
        return float(f"{self.makespan:.9g}")

    @property
    def makespan(self) -> float:
        """The longest time from a rank's first start to its last end, in milliseconds."""
        return max(rank.span for rank in self.ranks)

    @property
    def end(self) -> float:
        """The time at which the last rank is done, in milliseconds."""
        return max(rank.end for rank in self.ranks)

    @property
    def bubble_ratio(self) -> float:
        """The share of the makespan for which ranks with work are idle, on average."""
        working = self._working
        return 1.0 - self._share([rank.busy for rank in working]) if working else 0.0

    @property
    def exposed_ratio(self) -> float:
        """The share of the makespan for which ranks with work wait for messages on their way."""
        return self._share([rank.exposed for rank in self._working])

    def __str__(self) -> str:
        exposed = self.exposed_ratio
        known = "" if math.isnan(exposed) else f", exposed communication {exposed:.2%}"
        lines = [f"makespan {self.makespan:.3f} ms, bubble {self.bubble_ratio:.2%}{known}"]
        names = ("start ms", "end ms", "busy ms", "blocked ms", "exposed ms")
        lines.append("rank" + "".join(f"{name:>12}" for name in names) + f"{'peak bytes':>14}")
        for rank in self.ranks:
            times = (rank.start, rank.end, rank.busy, rank.blocked, rank.exposed)
            cells = "".join(f"{'-' if math.isnan(t) else f'{t:.3f}':>12}" for t in times)
            lines.append(f"{rank.rank:>4}{cells}{rank.peak_bytes:>14}")
        return "\n".join(lines)

    @property
    def _working(self) -> list[RankTimes]:
        return [rank for rank in self.ranks if rank.busy]

    def _share(self, times: list[float]) -> float:
        """The average of times, as a share of the makespan."""
        return sum(times) / len(times) / self.makespan if times else 0.0
