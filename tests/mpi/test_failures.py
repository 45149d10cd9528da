"""Messages that users see when something fails on a rank, by the public names: failure_job.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .jobs import Ended, needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(120)]

JOB = Path(__file__).with_name("failure_job.py")
SECONDS = 90.0


Reports = dict[int, list[dict[str, Any]]]
"""The reports of each rank."""


def fail(scenarios: str, *arguments: str, variables: dict[str, str] | None = None) -> Ended:
    """Run scenarios on four ranks, one after the other."""
    program = [str(JOB), scenarios, *arguments]
    # How a launcher takes the end of a process by a signal is seen where that is the rank itself.
    warm = scenarios != "killed"
    ranks = 4 if warm else 2  # each of which imports torch and cg
    return run(ranks, program, seconds=SECONDS, variables=variables, warm=warm)


@pytest.fixture(scope="module")
def survived() -> dict[str, Reports]:
    """The reports of the scenarios that leave all ranks in a state to go on."""
    names = (
        "raises",
        "raises_in_graph",
        "wrong_shape",
        "nested",
        "constants",
        "strays",
        "late",
        "diverge",
    )
    ended = fail(",".join(names))
    assert ended.code == 0, ended.output
    found: dict[str, Reports] = {name: {rank: [] for rank in range(4)} for name in names}
    said = re.findall(r"^rank (\d) in (\w+): (\{.*\})$", ended.output, re.MULTILINE)
    for rank, scenario, line in said:
        found[scenario][int(rank)].append(json.loads(line))
    return found


def test_an_exception_reaches_every_rank_and_the_step_can_run_again(
    survived: dict[str, Reports],
) -> None:
    for rank, (*errors, last) in survived["raises"].items():
        assert len(errors) == 3
        for error in errors:
            assert error["error"] == "RemoteError"
            assert (error["rank"], error["actor"], error["method"]) == (2, "failingstage2", "check")
            assert error["type"] == "ValueError"
            assert error["cause"] == ("ValueError" if rank == 2 else "NoneType")
            message = error["message"]
            assert message.startswith("ValueError on rank 2 in failingstage2.check: negative input")
            assert "called from " + str(JOB) in message
            assert "h = stages[2].check(x) + h  # the line that calls" in message
            assert "# the line that raises" in message
        assert last["calls"] == (7 if rank == 2 else None)


def test_an_exception_in_a_traced_line(survived: dict[str, Reports]) -> None:
    for error, after in survived["raises_in_graph"].values():
        assert (error["error"], error["type"], error["rank"]) == ("RemoteError", "IndexError", 2)
        assert error["message"].startswith("IndexError on rank 2 in failingstage2.look: ")
        assert "h = stages[2].look(part)" in error["message"]
        assert re.search(r"raised at \S+failure_job.py:\d+, in look\n", error["message"])
        assert after["loss"] > 0


def test_an_uncaught_exception_ends_the_job() -> None:
    ended = fail("uncaught")
    assert ended.code != 0
    assert re.search(
        r"\[rank \d\] cg\.\S*RemoteError: ValueError on rank 2 in failingstage2", ended.output
    )


@pytest.mark.parametrize("scenario", ["killed", "killed_between"])
def test_a_killed_rank_ends_the_job(scenario: str, tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    ended = fail(scenario, str(sign))
    assert sign.exists()
    assert ended.code != 0  # and it has ended by itself, long before the deadline of a step


def test_inputs_of_another_shape(survived: dict[str, Reports]) -> None:
    """On all ranks, then on one: all ranks raise it, and can go on."""
    for *errors, last in survived["wrong_shape"].values():
        assert len(errors) == 2
        assert last == {"done": True}
        for error in errors:
            assert "argument x of checked() must be float32[2,4]" in error["message"]
            assert "is float32[3,4]" in error["message"]


def test_a_signature_that_one_rank_alone_traces() -> None:
    ended = fail("other_shape")
    assert ended.code != 0
    assert "PlanMismatch: the ranks have come to different calls" in ended.output
    for where in (
        r"rank 1 is in the trace of step 'checked' .* for x: float32\[3,4\]",
        r"rank \d is in a call of step 'checked' .* for x: float32\[2,4\]",
    ):
        assert re.search(where, ended.output)


def test_ranks_that_call_different_steps(survived: dict[str, Reports]) -> None:
    for errors in survived["diverge"].values():
        first, second = errors
        assert first["error"] == "PlanMismatch"
        plan = r"plan \w+ on rank \d \(a call of step '(?:checked|other)' .*\)"
        assert re.search(rf"execution \d+ is of {plan}, and of {plan}\.", first["message"])
        for step in ("checked", "other"):
            assert f"(a call of step '{step}' (" + str(JOB) in first["message"]
        assert "Every rank must call the same compiled steps" in first["message"]
        # What the others have sent is still there: the steps cannot be run again.
        assert second["error"] == "TransportError"
        assert "out of step since an earlier error: execution" in second["message"]


def test_a_step_inside_a_method_raises_instead_of_a_hang(survived: dict[str, Reports]) -> None:
    for errors in survived["nested"].values():
        assert len(errors) == 3
        for error, step in zip(errors, ("checked", "looked", "asked"), strict=True):
            assert (error["error"], error["rank"], error["method"]) == ("RemoteError", 1, "ask")
            assert f"step '{step}' is used in a method of an actor" in error["message"]


def test_constants_are_results_as_well(survived: dict[str, Reports]) -> None:
    for rank, (everywhere, one) in survived["constants"].items():
        assert everywhere == {"all": {"k": 7, "n": None}}
        assert one == {"one": 7 if rank == 1 else None}


def test_ranks_that_trace_different_numbers(survived: dict[str, Reports]) -> None:
    for product, part in survived["strays"].values():
        assert (product["error"], part["error"]) == ("PlanMismatch", "PlanMismatch")
        assert "torch.mul, called at " + str(JOB) in product["message"]
        assert "is given 2 on ranks 0, 1 and 3, and 3 on rank 2. Every" in product["message"]
        assert "slice(0, 1, None) on ranks 0, 1 and 3, and slice(1, 2, None)" in part["message"]


def test_a_rank_that_ends_early() -> None:
    ended = fail("leave")
    assert ended.code != 0
    assert "rank 1 has ended after execution 0" in ended.output


def test_a_deadline_names_where_every_rank_is(survived: dict[str, Reports]) -> None:
    for first, second in survived["late"].values():
        assert "the step has not ended after 3.0 s" in first["message"]
        assert "the step has not ended after 3.5 s" in second["message"]
        for error in (first, second):
            assert error["error"] == "StepTimeout"
            # A rank that the machine has kept from reporting for half a second is taken to run.
            for rank in range(4):
                where = rf"rank {rank} (waits at|runs) .*, in slow \(`%|rank {rank} is at work"
                assert re.search(where, error["message"])
            assert "rank 1 has ended" not in error["message"]
            assert "has not come to" in error["message"]
