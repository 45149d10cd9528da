"""The CPU transport between processes: on one machine, and as if they were on several."""

from __future__ import annotations

import pytest

from .cpu_world import run_job

pytestmark = pytest.mark.timeout(90)

ONE, TWO = [0, 0], [0, 1]
MIXED = [0, 1, 0, 1]


@pytest.mark.parametrize("nodes", [ONE, TWO, MIXED], ids=str)
def test_messages_of_all_kinds(nodes: list[int]) -> None:
    reports = run_job("messages", nodes)
    assert reports[len(nodes) - 1] == list(range(0, 16, 2))


@pytest.mark.parametrize("nodes", [ONE, TWO], ids=str)
def test_reset_leaves_nothing_under_way(nodes: list[int]) -> None:
    assert run_job("reset", nodes)[1] == [[1.0] * 8, "fresh"]


@pytest.mark.parametrize("nodes", [[0, 0, 0], MIXED], ids=str)
def test_collectives_as_defined(nodes: list[int]) -> None:
    reports = run_job("collectives", nodes)
    assert list(reports.values()) == [[10_000, 3.0]] * len(nodes)


@pytest.mark.parametrize("nodes", [ONE, TWO, MIXED], ids=str)
def test_executions_end_together(nodes: list[int]) -> None:
    assert set(run_job("commits", nodes).values()) == {200}


@pytest.mark.parametrize("nodes", [[0, 0, 0], MIXED], ids=str)
def test_a_failure_reaches_every_rank(nodes: list[int]) -> None:
    assert len(run_job("failures", nodes)) == len(nodes)


@pytest.mark.parametrize("nodes", [[0, 0, 0]], ids=str)
def test_a_killed_rank_is_named(nodes: list[int]) -> None:
    reports = run_job("killed", nodes, code=9, survive=True)
    assert set(reports) == {0, 2}
    for message in reports.values():
        assert "rank 1 has died after execution 0" in message


@pytest.mark.parametrize("nodes", [[0, 0, 0], TWO], ids=str)
def test_a_rank_that_has_left_is_named(nodes: list[int]) -> None:
    reports = run_job("left", nodes)
    expected = "rank 1 has ended after execution 1, and the other ranks are in execution 2"
    for rank in set(reports) - {1}:
        assert expected in reports[rank]


@pytest.mark.parametrize("nodes", [[0, 0, 0], TWO], ids=str)
def test_another_plan_is_named(nodes: list[int]) -> None:
    reports = run_job("diverged", nodes)
    assert len(set(reports.values())) == 1
    assert "of plan 0000000000000008 on rank 0, and of plan 0000000000000007" in reports[0]


@pytest.mark.parametrize("nodes", [[0, 0, 0], TWO], ids=str)
def test_a_timeout_shows_where_all_ranks_are(nodes: list[int]) -> None:
    message = run_job("late", nodes)[0]
    assert "the step has not ended after 1.5 s" in message
    assert "rank 0 at 4 awaits 2" in message
    assert "rank 1" in message


@pytest.mark.parametrize("nodes", [ONE, TWO], ids=str)
def test_a_waiting_rank_leaves_the_core_to_others(nodes: list[int]) -> None:
    assert run_job("idle", nodes)[0] < 0.2
