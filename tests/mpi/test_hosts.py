"""Jobs over hosts that share neither memory nor processes; `hosts.py` makes them of this one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from . import hosts
from .jobs import Ended, needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(240)]

HERE = Path(__file__).parent
NAMES = ("north", "south")
LIMIT = "40"
"""The value of `CG_TIMEOUT`: an end that is said to be quick comes before."""


@pytest.fixture(autouse=True, scope="module")
def _possible() -> None:
    why = hosts.missing()
    if why:
        pytest.skip(why)


def launch(where: str, *program: str) -> Ended:
    """Run a program of this folder on some ranks of each host."""
    ranks = sum(int(each.partition(":")[2]) for each in where.split(","))
    launcher = [sys.executable, "-m", "cg.launch", "-n", str(ranks), "--hosts", where]
    script, *arguments = program
    job = hosts.command(NAMES, [*launcher, "--timeout", LIMIT, str(HERE / script), *arguments])
    return run(0, job[1:], seconds=160)


def test_steps_and_graphs_are_what_they_are_on_one_host() -> None:
    ended = launch("north:2,south:2", "hosts_job.py")
    assert ended.code == 0, ended.output
    assert "alike on north north south south, led by (0, 2)" in ended.output
    assert "refused on rank 2\n" in ended.output
    # UCX, which carries the messages, warns of those that nobody has received when MPI ends.
    assert "WARN" not in ended.output


@pytest.mark.slow  # `test_counting.py` has its program, on ranks of one host and on devices
def test_a_refused_call_counts_on_no_host(tmp_path: Path) -> None:
    ended = launch("north:1,south:1", "counting_job.py", str(tmp_path))
    assert ended.code == 0, ended.output
    assert ended.output.count("count alike") == 2


def test_a_rank_that_leaves_the_graphs_of_another_host_is_named() -> None:
    ended = launch("north:1,south:1", "endings_job.py", "forgets")
    assert ended.code != 0
    assert "rank 1 has ended while graphs are open" in ended.output, ended.output


def test_a_rank_that_ends_in_order_is_not_missed_by_its_host() -> None:
    ended = launch("north:1,south:2", "endings_job.py", "exits")
    assert ended.code == 0, ended.output


def test_the_death_of_a_rank_ends_the_ranks_of_the_other_host() -> None:
    ended = launch("north:1,south:1", "endings_job.py", "dies", "kill")
    assert ended.code != 0
    assert "(signal 9)" in ended.output, ended.output


@pytest.mark.slow  # `tests/launch/test_restarts.py` has the decisions, without hosts
def test_a_job_goes_on_without_a_host_that_has_died(tmp_path: Path) -> None:
    program = [sys.executable, str(HERE / "host_death_job.py"), str(tmp_path / "flag")]
    ended = run(0, hosts.command(NAMES, program)[1:], seconds=200)
    assert ended.code == 0, ended.output
    assert ended.output.count("start 0 on north: 4 ranks, 4\n") == 2, ended.output
    assert ended.output.count("start 0 on south: 4 ranks, 4\n") == 2
    assert "south is killed" in ended.output
    assert ended.output.count("start 1 on north: 2 ranks, 2\n") == 2
    assert ended.output.count("start 1") == 2
