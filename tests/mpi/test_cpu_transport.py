"""The CPU transport between processes: on one machine, and as if they were on two."""

from __future__ import annotations

import json
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .jobs import Ended, finish, needs_mpi, run, start

pytestmark = [*needs_mpi, pytest.mark.timeout(180)]

JOB = Path(__file__).with_name("cpu_scenarios.py")
SECONDS = 120.0

SCENARIOS = (
    "messages",
    "reset",
    "collectives",
    "commits",
    "failures",
    "compared",
    "diverged",
    "late",
    "idle",
    "left",  # the last: it ends a rank early
)
LAYOUTS = {"one machine": [0, 0, 0], "two machines": [0, 1, 0, 1]}

Reports = dict[str, dict[int, Any]]


def run_job(
    scenarios: Sequence[str], nodes: Sequence[int], *, launched: bool = True
) -> dict[str, dict[int, Any]]:
    """Run scenarios, one after the other, on one rank for each entry of `nodes`.

    Args:
        scenarios: names of functions of `cpu_scenarios.py`.
        nodes: for each rank the machine that it pretends to be on.
        launched: whether by mpiexec. Without it there is no MPI, the ranks meet through files,
            and nobody ends the other ranks when one dies.

    Returns:
        What each rank reported, by scenario.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = [str(JOB), ",".join(scenarios), json.dumps(list(nodes)), folder]
        before = shared_files()
        ends = (
            [run(len(nodes), program, seconds=SECONDS, warm=True)]
            if launched
            else alone(program, nodes)
        )
        problems = [end.output for end in ends if end.code not in (0, -signal.SIGKILL)]
        assert not problems, "\n".join(problems)
        assert not left_behind(before)
        reports: dict[str, dict[int, Any]] = {name: {} for name in scenarios}
        for file in Path(folder).glob("report-*"):
            _, scenario, rank = file.name.split("-")
            reports[scenario][int(rank)] = json.loads(file.read_text())
        return reports


def alone(program: Sequence[str], nodes: Sequence[int]) -> list[Ended]:
    """Run each rank as a process of its own, without MPI."""
    processes = [start(0, [*program, str(rank)], warm=True) for rank in range(len(nodes))]
    try:
        return [finish(process, SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()


def shared_files() -> set[str]:
    """This package's names in the shared memory file system."""
    return {path.name for path in Path("/dev/shm").glob("cg-*")}


def left_behind(before: set[str]) -> set[str]:
    """Names that are new and stay; a job of another test removes its own as soon as it has met."""
    new = shared_files() - before
    until = time.monotonic() + SECONDS / 2
    while new and time.monotonic() < until:
        time.sleep(0.01)
        new &= shared_files()
    return new


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def reports(request: pytest.FixtureRequest) -> Reports:
    """The reports of the ranks of one job; `messages` is from rank 0 to the last."""
    return run_job(SCENARIOS, LAYOUTS[request.param])


def test_messages_of_all_kinds(reports: Reports) -> None:
    found = reports["messages"]
    assert found[len(found) - 1] == list(range(0, 16, 2))


def test_reset_leaves_nothing_under_way(reports: Reports) -> None:
    assert reports["reset"][1] == [[1.0] * 8, "fresh"]


def test_collectives_as_defined(reports: Reports) -> None:
    assert all(value == [10_000, 3.0] for value in reports["collectives"].values())


def test_executions_end_together(reports: Reports) -> None:
    assert set(reports["commits"].values()) == {200}


def test_a_failure_reaches_every_rank(reports: Reports) -> None:
    assert set(reports["failures"].values()) == {3}  # the scenario has checked the errors


def test_digests_are_compared_among_the_ranks_that_count(reports: Reports) -> None:
    assert all(found == [True, False, True, True] for found in reports["compared"].values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_come_to_different_calls_are_named(layout: str) -> None:
    messages = run_job(["disordered"], LAYOUTS[layout])["disordered"]
    for message in messages.values():
        assert "rank 1 is in a call of its own" in message
        assert re.search(r"rank [023] is in another step", message)


def test_another_plan_is_named(reports: Reports) -> None:
    (message,) = set(reports["diverged"].values())
    assert "of plan 0000000000000007 on rank 1" in message
    assert "of plan 0000000000000008 on rank" in message


def test_a_timeout_shows_where_all_ranks_are(reports: Reports) -> None:
    (message,) = set(reports["late"].values())
    assert "the step has not ended after 2.5 s" in message
    assert re.search(r"rank 0 waits at .*: rank 1 never has message 0 of channel 0", message)
    assert "rank 1" in message


def test_a_waiting_rank_leaves_the_core_to_others(reports: Reports) -> None:
    # A rank that polls all the time has 1.0, one that sleeps less than 0.02.
    assert reports["idle"][0] < 0.2


def test_a_rank_that_has_left_is_named(reports: Reports) -> None:
    messages = [message for rank, message in reports["left"].items() if rank != 1]
    assert len(messages) >= 2
    for message in messages:
        assert "rank 1 has ended after execution" in message


def test_a_killed_rank_is_named_and_leaves_no_memory_behind() -> None:
    found = run_job(["killed"], [0, 0, 0], launched=False)["killed"]
    assert set(found) == {0, 2}
    for message in found.values():
        assert "rank 1 has died before the end of the first execution" in message
