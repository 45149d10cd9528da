"""Jobs that are started again: when, how often, on how many ranks, and when not."""

from __future__ import annotations

import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cg.launch.__main__ import main
from cg.launch.job.host_slots import HostSlots, ends_well
from cg.launch.job.launcher import LaunchError
from cg.launch.job.rank_registry import RankRegistry
from cg.launch.job.restarts import Fault, RestartPolicy

from ..mpi import warm as interpreting
from .conftest import Launch

PROGRAM = "restarting.py"


def fault(**fields: object) -> Fault:
    usual = {"ranks": 4, "code": 9, "steps": {"train": 7}, "report": None, "is_death": True}
    usual["has_begun"] = True
    return Fault(**{**usual, **fields})  # type: ignore[arg-type]


# -- jobs ---------------------------------------------------------------------------------------


def test_a_rank_that_dies_starts_the_job_again(launch: Launch) -> None:
    job = launch(2, PROGRAM, "die", options=["--restarts", "1"], warm=True)
    assert job.finish() == 0, job.output
    assert job.output.count("begins restarts=0 ranks=2.") == 2, job.output
    assert job.output.count("begins restarts=1 ranks=2.") == 2, job.output
    assert job.output.count("ends well") == 2
    # The launcher ends the job, or the other rank, whichever is faster.
    assert re.search(
        "cg.launch: the job has ended with exit code [19] on 2 ranks, in execution 2 of train. "
        "It starts again, for time 1 of 1",
        job.output,
    )


def test_the_execution_of_a_driven_graph_is_known(launch: Launch) -> None:
    job = launch(2, PROGRAM, "die_driven", options=["--restarts", "1"], warm=True)
    assert job.finish() == 0, job.output
    assert "on 2 ranks, in execution 2 of answer. It starts again, for time 1 of 1" in job.output
    assert job.output.count("ends well") == 2


def test_a_rank_that_vanishes_starts_the_job_again(launch: Launch) -> None:
    job = launch(2, PROGRAM, "vanish", options=["--restarts", "1"], warm=True)
    assert job.finish() == 0, job.output
    assert job.output.count("begins restarts=1 ranks=2.") == 2, job.output


@pytest.mark.parametrize("mode", ["early", "met"])
def test_a_start_without_an_execution_does_not_count(
    mode: str, launch: Launch, tmp_path: Path
) -> None:
    """Its ranks have not met, or have met, and one died behind `cg.restarts()`."""
    flag = str(tmp_path / "died")
    job = launch(2, PROGRAM, mode, flag, options=["--restarts", "3"], warm=True)
    assert job.finish() == 0, job.output
    assert "dies early" in job.output
    assert job.output.count("begins restarts=0 ranks=2.") >= 2, job.output
    assert "restarts=1" not in job.output
    assert "before the first execution of a step. It starts again, for time 1 of 3" in job.output


def test_a_fault_that_repeats_ends_the_job_with_both_reports(launch: Launch) -> None:
    job = launch(2, PROGRAM, "raise", options=["--restarts", "9"], warm=True)
    assert job.finish() == 1, job.output
    assert job.output.count("begins") == 4, job.output
    last = job.output.partition("as in the start before, so it is not started again.")[2]
    first, _, second = last.partition(
        "\n  start 2: exit code 1 on 2 ranks, in execution 2 of train"
    )
    assert first.startswith(" The reports of both:\n  start 1: exit code 1 on 2 ranks, in exec")
    assert "] ValueError: this batch is bad, says start 0" in first
    assert "] ValueError: this batch is bad, says start 1" in second


def test_a_death_that_repeats_ends_the_job(launch: Launch) -> None:
    job = launch(2, PROGRAM, "die_always", options=["--restarts", "9"], warm=True)
    assert job.finish() in (1, 9), job.output
    assert job.output.count("begins") == 4, job.output
    last = job.output.partition("as in the start before, so it is not started again.")[2]
    said = re.findall("no rank has said why; look at what is written above|rank 1 has died", last)
    assert len(said) == 2, job.output


def test_faults_that_differ_use_up_the_restarts(launch: Launch) -> None:
    job = launch(2, PROGRAM, "exit", options=["--restarts", "1"], warm=True)
    assert job.finish() == 6, job.output
    assert (
        "the job has ended with exit code 6 on 2 ranks, in execution 1 of train, and has been "
        "started again 1 time, as often as --restarts says" in job.output
    )


def test_a_job_goes_on_with_a_rank_less(launch: Launch) -> None:
    options = ["--restarts", "3", "--elastic", "2:3"]
    job = launch(3, PROGRAM, "die", options=options, warm=True)
    assert job.finish() == 0, job.output
    assert job.output.count("begins restarts=1 ranks=2.") == 2, job.output
    assert job.output.count("begins") == 5, job.output


def test_one_process_is_started_again(launch: Launch) -> None:
    alone = {interpreting.ALONE: "1"}
    job = launch(1, PROGRAM, "die", options=["--restarts", "1"], warm=True, **alone)
    assert job.finish() == 0, job.output
    assert "begins restarts=1 ranks=1." in job.output


def test_a_requeue_of_slurm_counts(launch: Launch) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", interpreting.ALONE: "1"}
    job = launch(1, PROGRAM, "none", warm=True, **slurm)
    assert job.finish() == 0, job.output
    assert "begins restarts=2 ranks=1." in job.output
    again = launch(1, PROGRAM, "raise", options=["--restarts", "3"], warm=True, **slurm)
    assert again.finish() == 1, again.output
    assert "begins restarts=2" in again.output
    assert "begins restarts=3" in again.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_does_not_start_it_again(
    launch: Launch, number: signal.Signals
) -> None:
    job = launch(2, PROGRAM, "wait", options=["--restarts", "3"], warm=True)
    job.wait_for("waits", 1)
    job.process.send_signal(number)
    assert job.finish() == 128 + number, job.output
    assert f"cg.launch: {number.name} ended all 2 ranks" in job.output
    assert job.output.count("begins") == 2, job.output


def test_an_interrupted_rank_does_not_start_it_again(launch: Launch) -> None:
    job = launch(2, PROGRAM, "interrupt", options=["--restarts", "3"], warm=True)
    assert job.finish() == 130, job.output
    assert "SIGINT ended a rank, and so the job: it is not started again" in job.output
    assert job.output.count("begins") == 2, job.output


# -- decisions ----------------------------------------------------------------------------------


def test_what_repeats() -> None:
    assert fault().repeats(fault())
    for fields in (
        {"ranks": 3},
        {"steps": {"train": 8}},
        {"steps": {"train": 7, "evaluate": 0}},
        {"is_death": False},
        {"steps": None},
    ):
        assert not fault(**fields).repeats(fault())
    assert fault(code=1, report="rank 1 has died").repeats(fault())
    assert not fault(steps={}).repeats(fault(steps={})), "a rank that is killed while it starts"
    error = fault(is_death=False, report="a", code=1)
    assert error.repeats(replace(error, report="b"))
    assert not error.repeats(replace(error, code=2))
    assert replace(error, steps={}).repeats(replace(error, steps={}))
    assert not replace(error, steps=None).repeats(replace(error, steps=None))


def test_the_ranks_that_are_left() -> None:
    assert RestartPolicy(3).left(fault(), None) == 4
    elastic = RestartPolicy.of("3", "2:8", 4)
    assert elastic.left(fault(), None) == 3
    assert elastic.left(fault(ranks=2), None) == 2
    assert elastic.left(fault(is_death=False), None) == 4
    assert elastic.left(fault(has_begun=False), None) == 4
    assert elastic.left(fault(), 2) == 2
    assert elastic.left(fault(), 12) == 8
    with pytest.raises(LaunchError, match="room for 1 rank, and --elastic wants at least 2"):
        elastic.left(fault(), 1)


def test_how_far_ranks_have_come(tmp_path: Path) -> None:
    registry = RankRegistry(tmp_path)
    marks = [registry.mark(rank, "train") for rank in range(2)]
    assert registry.steps() == {}
    evaluate = registry.mark(1, "evaluate")
    assert evaluate is not None
    for mark, execution in zip(marks, (6, 7), strict=True):
        assert mark is not None
        mark[0] = execution + 1
    evaluate[0] = 1
    assert registry.steps() == {"evaluate": 0, "train": 7}
    assert not registry.has_begun()
    registry.join(0)
    registry.leave(0)
    assert registry.has_begun()
    assert registry.present() == []
    assert RankRegistry(tmp_path / "not there").mark(0, "train") is None


def test_the_first_report_is_that_of_the_job(tmp_path: Path) -> None:
    registry = RankRegistry(tmp_path)
    assert registry.first_report() is None
    registry.report(1, "why")
    os.utime(tmp_path / "1.report", ns=(0, 0))
    registry.report(0, "since rank 1 has ended")
    registry.report(1, "later")
    assert registry.first_report() == "why"
    assert registry.first_report(of_death=True) is None
    registry.report(2, "rank 3 has died", of_death=True)
    assert registry.first_report(of_death=True) == "rank 3 has died"


def test_hosts_that_answer(tmp_path: Path) -> None:
    named = HostSlots.of("a:2,b:3,c", None)
    assert named.slots == 6
    left = named.answering(lambda name: name != "b", tmp_path)
    assert (left.options, left.slots) == (("a:2,c", None), 3)
    file = tmp_path / "machines"
    file.write_text("# ours\na:2  # the first\n\nb slots=2 max_slots = 4\nc slots = 3\nd\n")
    filed = HostSlots.of(None, str(file))
    assert filed.slots == 8
    left = filed.answering(lambda name: name in "bd", tmp_path)
    assert left.slots == 3
    assert left.options == (None, str(tmp_path / "hosts"))
    assert (tmp_path / "hosts").read_text() == "b slots=2 max_slots = 4\nd\n"


def test_a_host_answers_if_a_program_ends_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cg.launch.job.host_slots.PATIENCE", 0.2)
    assert ends_well(["true"], os.environ)
    assert not ends_well(["false"], os.environ)
    assert not ends_well(["sleep", "60"], os.environ)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--restarts", "-1"], "--restarts -1: it is a whole number of at least 0"),
        (["--elastic", "2:8"], "--elastic says on how many ranks to start again: give --restarts"),
        (["--restarts", "1", "--elastic", "3"], "--elastic 3: it is MIN:MAX"),
        (["--restarts", "1", "--elastic", "3:8"], "--elastic 3:8: it is MIN:MAX"),
        (["--restarts", "1", "--elastic", "1:1"], "--elastic 1:1: it is MIN:MAX"),
        (["--restarts", "1", "--elastic", "1:2", "--virtual"], "--virtual plays all ranks in one"),
    ],
)
def test_wrong_options(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-n", "2", *options, sys.executable]) == 2
    assert capsys.readouterr().err.startswith(f"cg.launch: {message}")
