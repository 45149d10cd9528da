"""Actors on meshes in processes of their own hold what they do in one process, bit for bit."""

from __future__ import annotations

import re

import pytest

from .jobs import needs_mpi, run

pytestmark = [*needs_mpi, pytest.mark.timeout(600)]

HASH = r"(\w+ on rank \d: [0-9a-f]{64})"


@pytest.mark.parametrize("extent", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_actors_on_meshes_hold_the_same_bits_in_processes(extent: str) -> None:
    """And what their constructors do wrong on one rank is an error on all of them."""
    job = ["-m", "tests.mpi.groups_job", extent]
    ended = run(4, job, seconds=240, warm=True)
    assert ended.code == 0, ended.output
    alone = run(0, job, seconds=240, variables={"CG_RANKS": "4"}, warm=True)
    assert alone.code == 0, alone.output
    found, expected = (sorted(re.findall(HASH, each.output)) for each in (ended, alone))
    assert len(expected) == (12 * 4 + 3 + 3 * 4 if extent == "all" else 5 * 4 + 1 * 4) + 2 * 3
    assert found == expected
    told = re.findall(r"rank (\d) was told: (.*)", ended.output)
    assert len(told) == 5 * 4
    for rank, rate in enumerate((1.0, 2.0)):
        assert ended.output.count(f"ranks {{{rank}}}: SGD(lr={rate}, ") == 4
    for rank, number in enumerate((2.0, 3.0)):
        line = f"ranks {{{rank}}}: %mul = aten.mul.Tensor(i_1, {number})"
        assert ended.output.count(line) == 4, "a number of one rank alone"
    for rank in (0, 1):
        assert ended.output.count(f"ranks {{{rank}}}: weight: torch.float32 (4,)") == 4
    for rank, words in told:
        if "other numbers" in words:
            assert re.match("ranks 0 and 1 have made (careless|uneven)0 with other numbers", words)
            assert "seed what else is drawn from (random, numpy)" in words
        elif "different functions" in words:
            assert re.match(r"ranks have traced @branching0\.(widened|scaled) to different", words)
        elif rank == "1":
            assert words == "no file here"
        else:
            assert words == "careless1 could not be made on rank 1: ValueError: no file here"


@pytest.mark.parametrize(
    "names", [("step", "uneven"), pytest.param(("task", "auto"), marks=pytest.mark.slow)]
)
def test_stored_parameters_travel_on_streams_of_devices(names: tuple[str, ...]) -> None:
    """Devices are fake ones, whose streams are threads, and the transport's are sockets."""
    job = ["-m", "tests.mpi.device_job", "tests.mpi.stored_job", *names]
    ended = run(4, job, seconds=180, warm=True)
    assert ended.code == 0, ended.output
    assert len(re.findall(r"agrees on rank \d", ended.output)) == 4 * len(names)
