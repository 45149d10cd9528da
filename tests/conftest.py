"""Options and fixtures that all tests share."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

import cg

from .sampling import DEFAULT

ROOT = Path(__file__).resolve().parent.parent

# How long an example takes says nothing of cg: the machine may be busy with other work.
settings.register_profile(
    "cg",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("cg")
# tests/properties draws in proportion to these: three times as much for `--slow`, and sixty times
# for `--hypothesis-profile=thorough`.
settings.register_profile("slow", settings.get_profile("cg"), max_examples=300)
settings.register_profile("thorough", settings.get_profile("cg"), max_examples=6000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the expected sections of tests/text/*.cg with what came out",
    )
    parser.addoption(
        "--slow",
        action="store_true",
        help="run the tests that take minutes, too: whole grids, three times the random examples",
    )
    parser.addoption(
        "--times",
        type=int,
        metavar="N",
        help="draw N times (more than 3) as many random examples as by default; others for each "
        "--hypothesis-seed, so several processes can share a long search",
    )
    parser.addoption(
        "--wheel",
        action="store_true",
        help="insist that the installed wheel is tested, not this checkout",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test another checkout's code, or the checkout where the wheel is meant."""
    times = config.getoption("--times")
    if times is not None:
        count = DEFAULT * times
        settings.register_profile("times", settings.get_profile("cg"), max_examples=count)
        settings.load_profile("times")
    elif config.getoption("--slow") and not config.getoption("--hypothesis-profile"):
        settings.load_profile("slow")
    here = Path(cg.__file__).resolve().parent == ROOT
    if config.getoption("--wheel") and here:
        raise pytest.UsageError(f"--wheel, but cg is imported from the checkout {ROOT}")
    if not config.getoption("--wheel") and not here:
        raise pytest.UsageError(
            f"cg is imported from {cg.__file__}, not from {ROOT}; run make setup in this checkout"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts processes under mpirun, and leave out what is slow."""
    if not config.getoption("--slow"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
    for item in items:
        if starts_jobs(item.nodeid):
            item.add_marker(pytest.mark.mpi)


def pytest_collection_finish() -> None:
    """Spare the collector what lives as long as the process: torch, and the tests themselves.

    A search through all that is left is rarer, too: together they took an eighth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 100)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many cases searches have drawn that count them, by `record_property`."""
    counts: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "call":
                counts.update({what: n for what, n in report.user_properties if type(n) is int})
    for what, count in counts.items():
        terminalreporter.write_line(f"{count:,} {what}")


def starts_jobs(nodeid: str) -> bool:
    """Whether a test starts processes under mpirun."""
    file = PurePosixPath(nodeid.partition("::")[0])
    return file.parts[1] in ("mpi", "examples") or file.name == "test_jobs.py"


class JobsByFile(LoadScopeScheduling):
    """Tests side by side; one process does those of a file that starts jobs, which share some."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0] if starts_jobs(nodeid) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> JobsByFile:
    """What hands tests to processes under `--numprocesses`."""
    return JobsByFile(config, log)
