"""Parameters that rest on the host, on the fake devices of several ranks: the same bits."""

from __future__ import annotations

import re

import pytest

from .jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    "words",
    [
        ["uneven"],
        pytest.param(
            ["1f1b", "zb-h1", "interleaved", "copies", "tp", "stored"], marks=pytest.mark.slow
        ),
    ],
)
def test_values_are_the_same_bits(words: list[str]) -> None:
    variables = {"CG_DEVICE": "fake", "CG_TIMEOUT": "100"}
    job = ["-m", "tests.mpi.resting_job", *words]
    ended = run(2, job, variables=variables, seconds=350, warm=True)
    assert ended.code == 0, ended.output
    lines = re.findall(r"(\S+) on rank (\d): (\d+) of (\d+) are the same bits", ended.output)
    assert {(word, int(rank)) for word, rank, _, _ in lines} == {
        (word, rank) for word in words for rank in (0, 1)
    }
    assert all(same == count for _, _, same, count in lines), ended.output
