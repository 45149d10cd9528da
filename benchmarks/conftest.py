"""The environment of the micro-benchmarks: the scripts beside them, and the machine they ran on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # as for a script of this folder

from provenance import machine


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """Save what other figures are saved with, but for the load: a comparison warns of changes."""
    machine_info.clear()
    machine_info.update(machine())
    del machine_info["load"]


def pytest_benchmark_update_commit_info(commit_info: dict[str, Any]) -> None:
    """Save the commit, and nothing of the folder in which it was checked out."""
    for key in ("project", "branch"):
        commit_info.pop(key, None)


@pytest.fixture(scope="session")
def quick(request: pytest.FixtureRequest) -> bool:
    """True if the cases only have to work: nothing is measured with `--benchmark-disable`."""
    return bool(request.config.getoption("benchmark_disable"))
