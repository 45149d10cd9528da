"""Agreement of ranks, through the public names: see agreement_job.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(240)]

JOB = Path(__file__).with_name("agreement_job.py")
GO_ON = ("shuffled", "some", "seldom", "skipped", "kinds", "baked", "caught", "states", "resumed")

Reports = dict[str, tuple[list[Any], list[Any]]]
"""The reports of each rank, by scenario."""


def said(output: str, scenario: str) -> tuple[list[Any], list[Any]]:
    lines = re.findall(rf"^rank (\d) in {scenario}: (\{{.*\}})$", output, re.MULTILINE)
    zero, one = ([json.loads(line) for who, line in lines if who == rank] for rank in "01")
    return zero, one


@pytest.fixture(scope="module")
def reports() -> Reports:
    """The reports of scenarios after which ranks can go on."""
    # The deadline is far away: what ranks do not agree on is found by looking, and not by waiting.
    ended = run(2, [str(JOB), ",".join(GO_ON)], seconds=200, warm=True)
    assert ended.code == 0, ended.output
    return {scenario: said(ended.output, scenario) for scenario in GO_ON}


def test_samplers_that_nobody_has_seeded(reports: Reports) -> None:
    for *found, untouched, third, fourth in reports["shuffled"]:
        assert len(found) == 2
        for error in found:
            assert error["error"] == "InputError"
            message = error["message"]
            assert "x (one value on rank 0, another on rank 1), y (one value on" in message
            assert "of train() differ between ranks in the call at " + str(JOB) in message
            for remedy in ("seed the sampler", "inputs=cg.on(0)", "in a method of an actor"):
                assert remedy in message
            assert "skipped" not in message  # they were never equal
        assert untouched["untouched"]  # nothing has run
        assert (third["error"], fourth["error"]) == (None, None)


def test_the_argument_that_differs_is_named(reports: Reports) -> None:
    zero, one = reports["some"]
    for part, about, equal, steps in (zero, one):
        assert "argument batch.y (one value on rank 0, another on" in part["message"]
        assert "argument about (one value on rank 0, another on" in about["message"]
        assert equal["error"] is None
        assert steps["steps"] in (None, 1)  # nothing has run where arguments differed


def test_how_often_arguments_are_compared(reports: Reports) -> None:
    for found in reports["seldom"]:
        assert [each["found"] for each in found] == [[0, 1, 2, 4, 8], [], [0, 3, 6]]


def test_a_rank_that_skips_a_call(reports: Reports) -> None:
    for equal, *errors in (found[:3] for found in reports["skipped"]):
        assert equal["error"] is None
        for error in errors:
            assert error["error"] == "InputError"
            assert "so a rank has perhaps skipped or repeated a call" in error["message"]
            assert "may have mixed" not in error["message"]  # all were compared
    for *equal, error in (found[3:] for found in reports["skipped"]):
        assert [each["error"] for each in equal] == [None] * 4  # the last was not compared
        assert "1 call since the last comparison may have mixed batches" in error["message"]


def test_other_steps_and_other_types_of_arguments(reports: Reports) -> None:
    expected = (
        r"the step is train\(x, y\), which line \d+ of agreement_job.py defines .* on rank 0, and "
        r"other\(x, y\), which line \d+ of agreement_job.py defines .* on rank 1",
        r"argument x of train\(\), .* is float32\[4,4\] on rank 0, and float64\[4,4\] on rank 1",
        r"argument x of train\(\), .* is float32\[4,4\] on rank 0, and float32\[3,4\] on rank 1",
        r"a step takes a numpy array as an argument; pass",
        r"argument k of <lambda>\(\), .* is 2 on rank 0, and 3 on rank 1",
        r"argument k of <lambda>\(\), .* is 'a' on rank 0, and 'aa' on rank 1",
    )
    for rank, (*errors, last) in enumerate(reports["kinds"]):
        for number, (error, pattern) in enumerate(zip(errors, expected, strict=True)):
            refused = rank == 1 and number == 3
            assert error["error"] == ("InputError" if refused else "PlanMismatch")
            assert re.search(pattern, error["message"])
        assert last["error"] is None


def test_what_is_baked_in(reports: Reports) -> None:
    expected = (
        rf"the constant made at {JOB}:\d+, in <lambda> is torch.float32 \[1.0\] on rank 0, and",
        r"is given slice\(0, None, None\) on rank 0, and slice\(8, None, None\) on rank 1",
        r"torch.pad, called at .*, is given 0, 1, 0.0 on rank 0, and 0, 1, 0.5 on rank 1",
        r"what it returns is 0: float32\[4,4\], 1: 0 on rank 0, and 0: float32\[4,4\], 1: 1 on",
        r"what it returns is loss: .*, right: .* on rank 0, and right: .*, loss: .* on rank 1",
        r"seed in compile\(\) is 0 on rank 0, and 1 on rank 1",
        r"schedule in compile\(\) is None on rank 0, and Schedule\(name='gpipe'",
        r"passes in compile\(\) is '' on rank 0, and '-overlap' on rank 1",
        r"check_inputs in compile\(\) is 0 on rank 0, and 1 on rank 1",
    )
    for *errors, timeouts in reports["baked"]:
        for error, pattern in zip(errors, expected, strict=True):
            assert error["error"] == "PlanMismatch"
            assert re.search(pattern, error["message"])
        assert timeouts["error"] is None  # which may differ


def test_an_error_that_one_rank_alone_catches(reports: Reports) -> None:
    zero, one = reports["caught"]
    for error in (*zero[:2], one[1], one[3]):
        assert error["error"] == "PlanMismatch"
        for words in ("rank 0 to the question whether the ranks compile", "rank 1 to cg.all"):
            assert words in error["message"]
    assert zero[-1] == one[-1] == {"values": [0, 1]}


def test_states_to_go_on_from(reports: Reports) -> None:
    for one, other, equal, state in reports["states"]:
        for error in (one, other):
            assert error["error"] == "PlanMismatch"
            assert (
                "calls: 2, seed: 0 on rank 0, and calls: 3, seed: 0 on rank 1" in (error["message"])
            )
        assert equal["error"] is None
        assert state["state"] == {"seed": 0, "calls": 2}


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(reports: Reports) -> None:
    for called, driven in reports["resumed"]:
        assert called["equal"]
        assert driven["equal"]
        assert driven["state"] == {"seed": 5, "calls": 0, "executions": 4}
        assert len(set(called["losses"])) == 6


@pytest.mark.parametrize(
    ("scenario", "calls"),
    [
        ("branched", "@dropoutstage0.loss, and rank 0 to that of @dropoutstage0.forward"),
        (
            "uneven",
            "@dropoutstage0.forward for f32[1,4], and rank 0 to that of "
            "@dropoutstage0.forward for f32[2",
        ),
    ],
)
def test_a_branch_that_depends_on_the_rank(scenario: str, calls: str) -> None:
    ended = run(2, [str(JOB), scenario], seconds=200, warm=True)
    error = said(ended.output, scenario)[1][0]
    assert error["error"] == "TraceError"
    assert f"come to the call of {calls}" in error["message"]


@pytest.mark.parametrize(
    ("scenario", "executing", "elsewhere"),
    [
        ("smaller", "float32[4,4], y: float32[4,4]", "the trace of step 'train'"),
        ("cleared", "float32[4,4], y: float32[4,4]", "the trace of step 'train'"),
        ("apart", "float32[4,4], y: float32[4,4]", "barrier at "),
    ],
)
def test_one_rank_alone_does_something_else(scenario: str, executing: str, elsewhere: str) -> None:
    ended = run(2, [str(JOB), scenario], seconds=200, warm=True)
    for first, *later in said(ended.output, scenario):
        assert first["error"] == "PlanMismatch"
        assert "rank 0 is in a call of step 'train'" in first["message"]
        assert executing in first["message"]
        assert f"rank 1 is in {elsewhere}" in first["message"]
        for error in later:
            assert error["error"] == "TransportError"
            assert "Start the job again" in error["message"]
    if scenario == "smaller":
        assert "for x: float32[3,4], y: float32[3,4]" in ended.output
