"""Communicators over fake devices do what every communicator must."""

from __future__ import annotations

import pytest

from cg.backends.fake.device import FABRIC

from ..conformance import EXECUTIONS, Case, check
from ..conformance_cases import cases
from .ranks import play

CASES = [
    case
    for case in cases()
    if not case.objects and (case.reduces is None or case.reduces in FABRIC.reduces)
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_streams(case: Case) -> None:
    compare(case, None)


@pytest.mark.parametrize("case", list(cases((2,))), ids=lambda case: case.name)
def test_from_devices_by_hosts(case: Case) -> None:
    """Values that streams do not carry are staged: objects, too, and collectives."""
    compare(case, "cpu")


def test_no_case_relies_on_a_host_that_does_not_wait_for_its_device() -> None:
    """`check-deadlock`, which each case runs, takes it to wait at each op."""
    assert sum(bool(case.module("nccl", in_one_order=True)) for case in CASES) > 100


def compare(case: Case, via: str | None) -> None:
    """Each execution gives what it gives in the virtual world."""
    actual = play(case.module(via), [case.inputs(i) for i in range(EXECUTIONS)])
    for i, expected in enumerate(case.expected()):
        for rank, values in enumerate(expected):
            check(actual[i][rank], values, f"{case.name}, execution {i}, rank {rank}")
