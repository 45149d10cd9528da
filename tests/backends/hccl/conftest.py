"""The mock of HCCL, compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest

from .build import COMPILER, build


@pytest.fixture(scope="session")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mock's `libhccl.so`."""
    if COMPILER is None:
        pytest.skip("the mock of HCCL is C, and there is no C compiler: install gcc")
    return build(tmp_path_factory.mktemp("hccl"))
