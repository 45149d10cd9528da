"""What breaking messages off leaves behind where the library fails to."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from cg.backends.nccl import pool as nccl
from cg.backends.nccl.pool import NcclPool
from cg.backends.streams.library import CommunicationError
from cg.backends.streams.pool import Group, Line

from .fakes import FakeDevice


class Broken:
    """A library whose communicators cannot be given up."""

    def abort(self, comm: object) -> None:
        raise CommunicationError("unhandled cuda error")


class Slow:
    """A library that is not done with it while a test looks."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def abort(self, comm: object) -> None:
        self.over.wait(60)


class Alone:
    """A world of one."""

    def allgather(self, value: Any) -> list[Any]:
        return [value]


def joined(library: Any) -> NcclPool:
    """A pool with one communicator."""
    world: Any = Alone()
    pool = NcclPool(world, FakeDevice(), library)
    group = Group((0, 1), collective=False)
    line = Line(group, 0)
    line.comm = object()
    pool._groups[group] = line
    return pool


def message(reason: str) -> str:
    return re.escape(
        "messages between devices could not be broken off after a failed step (rank 0: the edge "
        f"from rank 0 to rank 1: {reason}); start the job again"
    )


def test_an_error_of_it_hides_no_other_and_ends_the_use_of_messages() -> None:
    pool = joined(Broken())
    pool.abort()  # while the error that has brought it about is on its way to the user
    with pytest.raises(CommunicationError, match=message("unhandled cuda error")):
        pool.reset()
    pool.abort()
    with pytest.raises(CommunicationError, match=message("unhandled cuda error")):
        pool.reset()


def test_it_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "ABORT_SECONDS", 0.05)
    library = Slow()
    pool = joined(library)
    pool.abort()
    with pytest.raises(CommunicationError, match=message("it takes longer than 0.05 s")):
        pool.reset()
    library.over.set()
