"""Fixtures of modules whose tests run in a world of virtual ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import pytest
import torch

from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world


def virtual_world(
    size: int, *, threads: int | None = None, scope: Literal["function", "module"] = "function"
) -> Any:
    """A fixture of a world of `size` ranks around each test, or around the module.

    Args:
        threads: how many of them torch computes with meanwhile; None: as many as it has.
    """

    @pytest.fixture(autouse=True, scope=scope)
    def world() -> Iterator[None]:
        with (
            use_world(VirtualWorld(size)),
            nullcontext() if threads is None else _computing_with(threads),
        ):
            yield

    return world


@contextmanager
def _computing_with(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield
    torch.set_num_threads(before)
