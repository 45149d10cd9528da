"""What opaque methods of an actor on a mesh may not do is an error on all ranks: opaque_job.py."""

from __future__ import annotations

import re

import pytest

from .jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(200)]

LATE = "this is call 9 of the method. Call 5 was the last that was looked at"
WORDS = {
    "clips late": ("call 9: ", "takes _foreach_norm of a piece", LATE),
    "draws": ("call 1: ", "draws numbers by randn_like from its process's own generator"),
    "draws alike": ("as one process",),
    "hooks": ("as one process",),
    "hooks of stored pieces": ("as one process",),
    "hooks that look at pieces": ("call 9: ", "linalg_vector_norm of a piece", LATE),
    "draws for pieces": ("call 1: ", "takes add_ of a piece", "with numbers that it draws"),
}


@pytest.mark.parametrize("ranks", [0, 2])
def test_late_work_on_pieces_and_draws(ranks: int) -> None:
    variables = {} if ranks else {"CG_RANKS": "2"}
    job = ["-m", "tests.mpi.opaque_job"]
    ended = run(ranks, job, seconds=150, variables=variables, warm=True)
    assert ended.code == 0, ended.output
    for case, words in WORDS.items():
        lines = re.findall(rf"^rank \d {case}: (.*)$", ended.output, re.MULTILINE)
        assert len(lines) == max(ranks, 1)
        if len(words) > 1:
            words = (*words, "opaque_job.py:")
        assert all(word in line for line in lines for word in words), lines
