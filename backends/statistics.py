"""What an executable has measured of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Statistics:
    """Times of the executions that have ended, in seconds.

    Attributes:
        executions: how many have ended.
        failures: how many of them have failed, as far as the rank has learnt of it.
        total: from start to end.
        blocked: waiting for other ranks. In a virtual world, where one process plays every rank,
            that includes the other ranks' work.
        last_total, last_blocked: the same of the last execution alone.
    """

    executions: int = 0
    total: float = 0.0
    blocked: float = 0.0
    last_total: float = 0.0
    last_blocked: float = 0.0
    failures: int = 0

    @property
    def bubble(self) -> float:
        """The share of the time that the rank has waited, from 0 to 1."""
        return self.blocked / self.total if self.total else 0.0

    @property
    def last_bubble(self) -> float:
        """The same of the last execution."""
        return self.last_blocked / self.last_total if self.last_total else 0.0

    def __add__(self, other: Statistics) -> Statistics:
        """Both together; the last execution is that of `other`, if it has one."""
        last = other if other.executions else self
        return Statistics(
            self.executions + other.executions,
            self.total + other.total,
            self.blocked + other.blocked,
            last.last_total,
            last.last_blocked,
            self.failures + other.failures,
        )

    def record(self, total: float, blocked: float) -> None:
        """Count one execution."""
        self.executions += 1
        self.total += total
        self.blocked += blocked
        self.last_total = total
        self.last_blocked = blocked


@dataclass(frozen=True, slots=True)
class ProfileEntry:
    """What one instruction has cost since profiling was switched on.

    Attributes:
        op: index of its op in the program.
        text: the op in the IR's text form.
        runs: how often it was tried; a wait is tried again until it is done.
        seconds: time spent in it.
    """

    op: int
    text: str
    runs: int
    seconds: float
