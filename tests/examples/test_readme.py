"""The first program of the README runs as it is printed there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..mpi.jobs import ROOT, needs_mpi, run


def program(folder: Path) -> str:
    """The README's first Python block, as a file."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    file = folder / "step.py"
    file.write_text(block[1])
    return str(file)


def printed(output: str) -> dict[int, float]:
    """The loss that each rank has printed."""
    lines = re.findall(r"^(\d+) (\d+\.\d+)$", output, re.MULTILINE)
    return {int(rank): float(loss) for rank, loss in lines}


@pytest.fixture(scope="module")
def virtual(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses that it prints in one process that plays three ranks."""
    folder = tmp_path_factory.mktemp("virtual")
    ranks = {"CG_RANKS": "3"}
    ended = run(0, [program(folder)], variables=ranks, folder=folder, seconds=80, warm=True)
    assert ended.code == 0, ended.output
    return printed(ended.output)


@pytest.mark.timeout(250)
def test_in_one_process(virtual: dict[int, float]) -> None:
    assert set(virtual) == {0}


@pytest.mark.timeout(250)
@pytest.mark.parametrize("ranks", [pytest.param(3, marks=needs_mpi)])
def test_on_mpi_ranks(ranks: int, virtual: dict[int, float], tmp_path: Path) -> None:
    ended = run(ranks, [program(tmp_path)], folder=tmp_path, seconds=80, warm=True)
    assert ended.code == 0, ended.output
    assert printed(ended.output) == dict.fromkeys(range(ranks), virtual[0])
