"""Options and fixtures that all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

import cg

ROOT = Path(__file__).resolve().parent.parent

# For `pytest --hypothesis-profile=thorough`; tests/properties draws in proportion to it.
settings.register_profile("thorough", max_examples=2000, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the expected sections of tests/text/*.cg with what came out",
    )
    parser.addoption(
        "--slow", action="store_true", help="run the tests that take minutes, too: whole grids"
    )
    parser.addoption(
        "--wheel",
        action="store_true",
        help="insist that the installed wheel is tested, not this checkout",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test another checkout's code, or the checkout where the wheel is meant."""
    here = Path(cg.__file__).resolve().parent == ROOT
    if config.getoption("--wheel") and here:
        raise pytest.UsageError(f"--wheel, but cg is imported from the checkout {ROOT}")
    if not config.getoption("--wheel") and not here:
        raise pytest.UsageError(
            f"cg is imported from {cg.__file__}, not from {ROOT}; run make setup in this checkout"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts processes under mpirun, and leave out what is slow."""
    tests = ROOT / "tests"
    if not config.getoption("--slow"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
    for item in items:
        file = item.path.relative_to(tests)
        if file.parts[0] in ("mpi", "examples") or file.name == "test_jobs.py":
            item.add_marker(pytest.mark.mpi)
