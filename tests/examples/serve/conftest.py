"""Servers that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .servers import Server, serving

SHORT = {"idle": 1.0, "read": 0.5, "drain": 5.0}
"""Bounds whose ends tests wait for."""


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One with the usual bounds, which no test leaves otherwise than it found it."""
    with serving(tmp_path_factory.mktemp("server"), bounds=SHORT) as found:
        yield found


@pytest.fixture
def clean(server: Server) -> Iterator[Server]:
    """The shared server; afterwards it holds no requests, blocks or files beyond those before."""
    server.wait_for(server.is_empty)
    files = server.files()
    yield server
    server.wait_for(server.is_empty, "an empty engine")
    server.wait_for(lambda: server.files() <= files, f"{files} open files or fewer")
    assert server.get("/health")[0] == 200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
