"""Graphs driven from one rank, between processes: see executions_job.py and endings_job.py."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from .jobs import Ended, finish, needs_mpi, run, start

pytestmark = [*needs_mpi, pytest.mark.timeout(300)]

JOB = str(Path(__file__).with_name("executions_job.py"))
ENDINGS = str(Path(__file__).with_name("endings_job.py"))
SCENARIOS = (
    "values",
    "kept",
    "tensors",
    "flow",
    "pipelined",
    "errors",
    "first_failure",
    "timeouts",
    "room",
    "positions",
    "awaits",
    "many",
    "variants",
    "mixed",
    "idle",
)


DRIVING = str(Path(__file__).with_name("driving.py"))
DEPARTURES = {
    "exit": ("SystemExit(5)", "sys.exit(5)", "leave"),
    "raise": ("SystemExit(6)", "raise SystemExit(6)", "leave"),
    "leave": ("SystemExit()", "sys.exit()", "leave_quietly"),
    "interrupt": ("interrupted", "raise KeyboardInterrupt", "leave"),
}
"""Ways in which a method ends its process: what that is called, its line, and in which function."""


def departure(how: str) -> str:
    """How a rank names the exception, and its place."""
    error, text, function = DEPARTURES[how]
    lines = [line.strip() for line in Path(ENDINGS).read_text().splitlines()]
    return f"{error} at {ENDINGS}:{lines.index(text) + 1}, in {function}"


def end(how: str, *arguments: str, ranks: int = 4) -> Ended:
    return run(ranks, [ENDINGS, how, *arguments], seconds=200, warm=True)


@pytest.mark.parametrize("nodes", ["0000", "0011"], ids=["one machine", "two machines"])
def test_scenarios(nodes: str) -> None:
    ended = run(4, [JOB, ",".join(SCENARIOS), nodes], seconds=200, warm=True)
    assert ended.code == 0, ended.output
    passed = [line.split()[1] for line in ended.output.splitlines() if line.startswith("passed")]
    assert passed == list(SCENARIOS), ended.output


def test_a_driver_that_does_not_close_ends_all_the_same() -> None:
    ended = end("exits")
    assert ended.code == 0, ended.output


def test_a_rank_that_does_not_serve_is_named() -> None:
    ended = end("forgets", ranks=3)
    assert ended.code != 0
    assert "rank 1 has ended while graphs are open" in ended.output


@pytest.mark.parametrize("how", ["kill", "exit", "raise", "leave"])
def test_a_rank_that_dies_ends_the_job(how: str) -> None:
    ended = end("dies", how)
    assert ended.code != 0
    if how in DEPARTURES:
        said = f"[rank 1] {departure(how)}; on rank 1 in worker0.leave, called from {DRIVING}:"
        assert ended.output.count(said) == 1, ended.output
        assert ", in chain. It ends the program of this rank, unless that" in ended.output


@pytest.mark.parametrize("how", DEPARTURES)
def test_a_driver_whose_method_ends_it_names_that(how: str) -> None:
    ended = end("driver_dies", how, ranks=2)
    assert ended.code == {"exit": 5, "leave": 0, "interrupt": 130}.get(how, ended.code)
    said = f"[rank 0] {departure(how)}; on rank 0 in worker0.leave, called from {DRIVING}:"
    assert ended.output.count(said) == 1, ended.output


@pytest.mark.parametrize("how", DEPARTURES)
def test_a_step_whose_method_ends_its_rank_names_that(how: str) -> None:
    ended = end("dies_in_step", how, ranks=2)
    said = f"[rank 1] {departure(how)}; on rank 1 in worker0.leave, called from {ENDINGS}:"
    assert ended.output.count(said) == 1, ended.output


def test_an_error_that_nobody_catches_ends_the_job() -> None:
    ended = end("throws")
    assert ended.code != 0
    assert "Boom on rank 1 in worker" in ended.output
    assert 'raise Boom(f"{self.tag} got {x!r}", 7)' in ended.output


def test_ctrl_c_ends_the_job(tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    process = start(3, [ENDINGS, "waits", str(sign)])
    until = time.monotonic() + 60
    while not sign.exists() and time.monotonic() < until and process.poll() is None:
        time.sleep(0.05)
    assert sign.exists(), finish(process, 10).output
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    assert finish(process, 30).code != 0
