"""Values that actors keep, change and hand out, between processes: see ownership_job.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.wheel, pytest.mark.timeout(200)]

JOB = Path(__file__).with_name("ownership_job.py")

BEHAVIOURS = (
    "memory_that_is_filled_again",
    "memory_that_waits_for_something_else",
    "results_are_the_callers_own",
    "results_with_a_history",
    "what_a_carry_is_set_to",
    "methods_that_ask_for_results",
    "methods_that_leave",
    "errors_without_a_text",
    "tensors_of_torchs_own_kinds",
    "a_carry_keeps_its_type",
)


@pytest.mark.parametrize("nodes", ["00", "01"], ids=["one machine", "two machines"])
def test_ownership(nodes: str) -> None:
    ended = run(2, [str(JOB), nodes], seconds=150, warm=True)
    assert ended.code == 0, ended.output
    passed = [line.split()[1] for line in ended.output.splitlines() if line.startswith("passed")]
    assert passed == list(BEHAVIOURS), ended.output
