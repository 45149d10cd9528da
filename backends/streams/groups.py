"""Groups of ranks that communicators join, a rank's part in them, and a plan's use of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

from ...ir.attributes import Traffic
from ...ir.types import format_ranks
from .library import CommunicationError

USE_SECONDS = 30.0
"""Seconds in which another thread has to be through with a communicator: it asks for errors."""
BROKEN_OFF = "its messages are broken off, since a rank has failed"


@dataclass(frozen=True)
class CommunicatorGroup:
    """The ranks of a communicator: source and destination, or the members of a collective.

    A rank's place in `ranks` is its number as a member.

    Attributes:
        traffic: what it is for, where groups of the same ranks differ in that.
    """

    ranks: tuple[int, ...]
    collective: bool
    traffic: Traffic | None = None

    def __str__(self) -> str:
        if self.collective:
            purpose = f" of {self.traffic.value}s" if self.traffic is not None else ""
            return f"the group{purpose} {format_ranks(self.ranks)}"
        purpose = f" of the {self.traffic.value}" if self.traffic is not None else ""
        return f"the edge{purpose} from rank {self.ranks[0]} to rank {self.ranks[1]}"


class Line:
    """This rank's membership of a communicator.

    A block `with line as comm:` uses the communicator, which nobody gives up meanwhile.

    Args:
        in_use: held by whoever uses or takes away a communicator of this rank.

    Attributes:
        comm: another one after a reset; None while operations are broken off.
    """

    __slots__ = ("_in_use", "comm", "group", "member")

    def __init__(self, group: CommunicatorGroup, member: int, in_use: Lock) -> None:
        self.group = group
        self.member = member
        self.comm: Any = None
        self._in_use = in_use

    def __enter__(self) -> Any:
        """The communicator.

        Raises:
            CommunicationError: its operations are broken off, or another thread holds it.
        """
        if not self._in_use.acquire(timeout=USE_SECONDS):
            raise CommunicationError("another thread has been using it, and does not end")
        if self.comm is None:
            self._in_use.release()
            raise CommunicationError(BROKEN_OFF)
        return self.comm

    def __exit__(self, *_: object) -> None:
        self._in_use.release()

    @property
    def peer(self) -> int:
        """The number of the other member of two."""
        return 1 - self.member


class Lease:
    """The communicators of a pool that an open plan uses.

    Attributes:
        lines: for each channel that this rank is part of, its membership.
        step: the name of the plan's step, for messages; empty: not known.
    """

    def __init__(self, lines: Mapping[int, Line]) -> None:
        self.lines = lines
        self.step = ""

    @property
    def groups(self) -> dict[CommunicatorGroup, None]:
        """The groups of the communicators, each once, in the order of the channels."""
        return dict.fromkeys(line.group for line in self.lines.values())
