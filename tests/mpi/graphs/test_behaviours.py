"""Behaviours of graphs between processes, one a test: see behaviours_job.py."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ..jobs import Ended, needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.wheel, pytest.mark.timeout(200)]

JOB = Path(__file__).with_name("behaviours_job.py")


def behaviours() -> list[str]:
    """The names in the job's list; reading them does not import it."""
    for statement in ast.parse(JOB.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "BEHAVIOURS":
            assert isinstance(statement.value, ast.Tuple)
            return [ast.unparse(name) for name in statement.value.elts]
    raise AssertionError("the job has no list of behaviours")


@pytest.fixture(scope="module", params=["0000", "0011"], ids=["one machine", "two machines"])
def ended(request: pytest.FixtureRequest) -> Ended:
    limit = {"CG_TIMEOUT": "100"}  # so that ranks say where they are, if they do not end
    return run(4, [str(JOB), request.param], seconds=150, variables=limit, warm=True)


@pytest.mark.parametrize("name", behaviours())
def test_behaviour(name: str, ended: Ended) -> None:
    assert f"passed {name}\n" in ended.output, ended.output


def test_the_job_ends_although_a_graph_is_open(ended: Ended) -> None:
    assert ended.code == 0, ended.output
