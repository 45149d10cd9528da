"""The state that breaking messages off leaves behind where the library fails to."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from cg.backends.nccl import pool as nccl
from cg.backends.nccl.pool import NcclPool
from cg.backends.streams.library import CommunicationError
from cg.ir.ops.module import Channel
from tests.backends.devices.patience import loose_device

THERE, ELSEWHERE = Channel(0, (0, 1)), Channel(1, (0, 2))


class Connecting:
    """A library that joins communicators, and carries their first messages to nowhere."""

    def unique_id(self) -> bytes:
        return b""

    def connect(self, size: int, unique: bytes, rank: int) -> object:
        return object()

    def is_ready(self, comm: object) -> bool:
        return True

    def send(self, *message: object) -> None: ...

    recv = send


class Broken(Connecting):
    """A library whose communicators cannot be given up."""

    def abort(self, comm: object) -> None:
        raise CommunicationError("unhandled cuda error")


class Slow(Connecting):
    """A library that is not done with it while a test looks."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def abort(self, comm: object) -> None:
        self.over.wait(60)


class Alone:
    """A world of which one rank is here."""

    rank = 0

    def allgather(self, value: Any) -> list[Any]:
        return [value]


def joined(library: Any) -> NcclPool:
    """A pool with one communicator."""
    world: Any = Alone()
    pool = NcclPool(world, loose_device(), library)
    pool.join([THERE])
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


def test_one_that_ends_after_the_failure_is_none_that_is_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl, "ABORT_SECONDS", 0.0)
    library = Slow()
    pool = joined(library)
    pool.abort()  # the rank has not waited for it
    library.over.set()
    pool.reset()


def test_it_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "ABORT_SECONDS", 0.0)
    monkeypatch.setattr(nccl, "RESET_SECONDS", 0.05)
    library = Slow()
    pool = joined(library)
    pool.abort()
    with pytest.raises(CommunicationError, match=message("it takes longer than 0.05 s")):
        pool.reset()
    library.over.set()


class Strict(Connecting):
    """A library that may be asked about communicators that there are, and about no others.

    The first question is answered when `answer` is set.
    """

    def __init__(self) -> None:
        self.asked, self.answer = threading.Event(), threading.Event()
        self.given_up: list[object] = []
        self.wrong: list[object] = []

    def error(self, comm: object) -> str | None:
        self.asked.set()
        self.answer.wait(20)
        if comm is None or comm in self.given_up:
            self.wrong.append(comm)
        return "unhandled system error"

    def abort(self, comm: object) -> None:
        self.given_up.append(comm)

    destroy = abort


@pytest.mark.parametrize("give_up", [NcclPool.abort, NcclPool.close])
def test_nobody_asks_about_a_communicator_that_is_given_up(
    give_up: Callable[[NcclPool], None],
) -> None:
    library = Strict()
    pool = joined(library)
    found: list[str] = []
    asks = threading.Thread(target=lambda: found.extend(pool.errors()), daemon=True)
    asks.start()
    assert library.asked.wait(20)
    gives_up = threading.Thread(target=give_up, args=(pool,), daemon=True)
    gives_up.start()
    gives_up.join(0.1)  # long enough to go wrong, if nothing holds it up
    assert library.given_up == []
    library.answer.set()
    asks.join(20)
    gives_up.join(20)
    assert len(library.given_up) == 1
    assert library.wrong == []
    assert found == ["the edge from rank 0 to rank 1: unhandled system error"]
    assert pool.errors() == []


def test_one_that_goes_between_two_questions_is_left_out() -> None:
    library = Strict()
    library.answer.set()
    pool = joined(library)
    other = pool.join([ELSEWHERE]).lines[ELSEWHERE.id]
    said = library.error

    def error(comm: object) -> str | None:
        other.comm = None
        return said(comm)

    library.error = error  # type: ignore[method-assign]
    assert len(pool.errors()) == 1
    assert library.wrong == []


def test_what_others_break_off_is_no_error_while_a_failure_is_dealt_with() -> None:
    library = Strict()
    library.answer.set()
    pool = joined(library)
    told: list[list[str]] = []

    class Holder:
        def drop_graphs(self) -> None:
            told.append(pool.errors())

    holder = Holder()
    pool.hold(holder)
    pool.abort()
    assert told == [[]]
