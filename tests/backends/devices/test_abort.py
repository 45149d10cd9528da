"""What breaking messages off leaves behind where the library fails to."""

from __future__ import annotations

from typing import Any

import pytest

from cg.backends.nccl.pool import NcclPool
from cg.backends.streams.library import CommunicationError
from cg.backends.streams.pool import Group, Line

from .fakes import FakeDevice


class Broken:
    """A library whose communicators cannot be given up."""

    def abort(self, comm: object) -> None:
        raise CommunicationError("unhandled cuda error")


class Alone:
    """A world of one."""

    def allgather(self, value: Any) -> list[Any]:
        return [value]


def test_an_error_of_it_hides_no_other_and_ends_the_use_of_messages() -> None:
    library: Any = Broken()
    world: Any = Alone()
    pool = NcclPool(world, FakeDevice(), library)
    group = Group((0, 1), collective=False)
    line = Line(group, 0)
    line.comm = object()
    pool._groups[group] = line
    pool.abort()  # while the error that has brought it about is on its way to the user
    with pytest.raises(CommunicationError, match=r"could not be broken off .* start the job again"):
        pool.reset()
