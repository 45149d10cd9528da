"""The stream communicator, over fake devices, does what every communicator must."""

from __future__ import annotations

import pytest

from ..conformance import EXECUTIONS, Case, cases, check
from .fakes import FABRIC
from .ranks import play

CASES = [
    case
    for case in cases()
    if not case.objects and (case.reduces is None or case.reduces in FABRIC.reduces)
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_streams(case: Case) -> None:
    actual = play(case.module(), [case.inputs(i) for i in range(EXECUTIONS)])
    for i, expected in enumerate(case.expected()):
        for rank, values in enumerate(expected):
            check(actual[i][rank], values, f"{case.name}, execution {i}, rank {rank}")
