"""Messages that users see on every rank when one hangs: see hang_job.py."""

from __future__ import annotations

import json
import re
import socket
import tempfile
import time
from pathlib import Path

import pytest

from .jobs import Ended, finish, needs_mpi, run, start

pytestmark = [*needs_mpi, pytest.mark.timeout(150)]

JOB = Path(__file__).with_name("hang_job.py")
SECONDS = 90.0

Messages = dict[str, dict[int, str]]
"""The messages that the ranks got, by scenario."""

HERE = r"\S+hang_job\.py:\d+"


def hang(*scenarios: str, timeout: str = "60") -> Ended:
    """Run scenarios on three ranks, one after the other."""
    variables = {"CG_TIMEOUT": timeout}
    with tempfile.NamedTemporaryFile() as file:
        program = [str(JOB), ",".join(scenarios), file.name]
        return run(3, program, seconds=SECONDS, variables=variables, warm=True)


def messages(*scenarios: str) -> Messages:
    ended = hang(*scenarios)
    assert ended.code == 0, ended.output
    found: Messages = {scenario: {} for scenario in scenarios}
    said = re.findall(r"^rank (\d) in (\w+): (\{.*\})$", ended.output, re.MULTILINE)
    for rank, scenario, line in said:
        found[scenario][int(rank)] = json.loads(line)["message"]
    return found


@pytest.fixture(scope="module")
def steps() -> Messages:
    """The messages about steps that all ranks run."""
    return messages("asleep", "busy", "keeping", "outside", "outside_keeping")


@pytest.fixture(scope="module")
def graphs() -> Messages:
    """The messages about graphs that rank 0 drives."""
    return messages("driven_asleep", "driven_busy", "driven_keeping", "absent")


def check(message: str, method: str, step: str, comment: str) -> None:
    """Rank 1 is in that method of that step, and at the line with that comment."""
    where = rf"rank 1 .*runs hangingstage1\.{method} \({HERE}\).*, called at {HERE}, in {step} \(`%"
    assert re.search(where, message), message
    since = r"rank 1 (runs .* for \d+\.\d s at most, called|has not answered in \d\.\d s)"
    assert re.search(since, message), message
    line = rf"its Python is at {HERE}, in {method}: .*{comment}"
    assert re.search(line, message), message
    assert re.search(rf"    it is process \d+ on {re.escape(socket.gethostname())}$", message, re.M)


METHODS = {
    "asleep": "# asleep here",
    "busy": r"(# busy here|pass)",
    "keeping": "# the lock is kept here",
}


@pytest.mark.parametrize("method", METHODS)
def test_every_rank_is_told_which_method_another_hangs_in(steps: Messages, method: str) -> None:
    assert sorted(steps[method]) == [0, 1, 2]
    for message in steps[method].values():
        assert "the step has not ended after 3.0 s" in message
        check(message, method, "step", METHODS[method])
        for rank in (0, 2):
            assert re.search(rf"rank {rank} (waits at {HERE}, in step|has done its part)", message)


@pytest.mark.parametrize("scenario", ["outside", "outside_keeping"])
def test_every_rank_is_told_where_one_is_that_does_not_come(steps: Messages, scenario: str) -> None:
    assert sorted(steps[scenario]) == [0, 1, 2]
    for message in steps[scenario].values():
        where = r"rank 1 (is outside of executions, after execution \d+, for|has not answered in)"
        assert re.search(where, message), message
        line = rf"its Python is at {HERE}, in between: wait\(GATE, ALONE\)  # between two steps"
        assert re.search(line, message), message


@pytest.mark.parametrize("method", METHODS)
def test_the_driver_is_told_which_method_a_rank_hangs_in(graphs: Messages, method: str) -> None:
    (message,) = graphs[f"driven_{method}"].values()
    assert message.startswith("execution 1 has not ended after 3 s\n")
    check(message, method, "step", METHODS[method])
    for rank in (0, 2):
        assert re.search(rf"@step 1: rank {rank} waits at {HERE}, in step", message), message


def test_the_driver_is_told_where_a_rank_is_that_does_not_serve(graphs: Messages) -> None:
    (message,) = graphs["absent"].values()
    assert re.search(r"rank 1 (is outside of executions|has not answered)", message)
    line = rf"its Python is at {HERE}, in absent: fcntl\.flock\(GATE, ALONE\)  # before it serves"
    assert re.search(line, message), message


def check_end(ended: Ended, late: bool = True) -> None:
    """The job has failed, and the driver has said why."""
    assert ended.code != 0, ended.output
    assert (
        not late or "'step' has not been closed: executions of it are in flight (1)" in ended.output
    )
    where = rf"\[rank 0\]   @step \d: rank 1 runs hangingstage1\.late \({HERE}\)"
    assert re.search(where, ended.output), ended.output
    line = rf"\[rank 0\]     its Python is at {HERE}, in late: time\.sleep\(3600\)  # for ever"
    assert re.search(line, ended.output), ended.output


@pytest.mark.parametrize("scenario", ["closing", "forgetting", "catching", "exiting"])
def test_closing_does_not_wait_for_ever(scenario: str) -> None:
    check_end(hang(scenario))


def test_closing_under_the_launcher_leaves_no_process() -> None:
    marker = f"marker-{time.monotonic_ns()}"
    with tempfile.NamedTemporaryFile() as file:
        program = ["-m", "cg.launch", "-n", "3", str(JOB), "closing", file.name, marker]
        check_end(finish(start(0, program), SECONDS))
    left = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker in path.read_text():
                left.append(path.parent.name)
        except OSError:
            continue
    assert left == []


def test_a_stopped_process_is_told_from_one_that_works() -> None:
    ended = hang("stopped")
    assert ended.code != 0
    said = r"rank 1 has not answered in 0\.4 s: .* or its process is stopped"
    assert re.search(said, ended.output), ended.output


def test_a_barrier_says_where_the_missing_rank_is() -> None:
    ended = hang("barrier", timeout="6")  # also for ranks to begin
    assert ended.code != 0
    assert re.search(r"rank [02] gave up barrier .* rank 1 did not come", ended.output)
    line = rf"its Python is at {HERE}, in barrier: time\.sleep\(3600\)  # before the barrier"
    assert re.search(line, ended.output), ended.output


def test_the_end_of_a_program_says_which_rank_it_waits_for(tmp_path: Path) -> None:
    program = tmp_path / "late.py"
    program.write_text(
        "import time\nimport cg\n\nif cg.rank() == 1:\n    time.sleep(3600)  # it does not end\n"
    )
    variables = {"CG_TIMEOUT": "6"}
    ended = run(2, [str(program)], seconds=SECONDS, variables=variables, warm=True)
    assert ended.code != 0
    assert "the program of rank 0 ended 6 s ago, but another rank's still runs" in ended.output
    line = r"its Python is at \S+late\.py:5, in <module>: time\.sleep\(3600\)  # it does not end"
    assert re.search(line, ended.output), ended.output
