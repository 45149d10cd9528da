"""The shortest program from a plain loop to a zero-bubble pipeline: as documented, and running."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..mpi.jobs import ROOT, Ended, needs_mpi, run

PROGRAM = ROOT / "examples" / "zero_bubble.py"
PAGE = ROOT / "docs" / "guide" / "zero-bubble.md"


def test_the_guide_shows_the_program_as_it_is() -> None:
    text = PROGRAM.read_text(encoding="utf-8")
    assert f"```python\n{text}```\n" in PAGE.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 70


@pytest.mark.timeout(250)
def test_in_one_process(tmp_path: Path) -> None:
    check(run(0, [str(PROGRAM)], folder=tmp_path, seconds=80, warm=True), ranks=1)


@pytest.mark.timeout(250)
@pytest.mark.parametrize("ranks", [pytest.param(4, marks=needs_mpi)])
def test_on_mpi_ranks(ranks: int, tmp_path: Path) -> None:
    check(run(ranks, [str(PROGRAM)], folder=tmp_path, seconds=80, warm=True), ranks)


def check(ended: Ended, ranks: int) -> None:
    assert ended.code == 0, ended.output
    (losses,) = re.findall(r"^loss (\S+), after 20 steps (\S+)$", ended.output, re.MULTILINE)
    assert float(losses[1]) < 0.7 * float(losses[0])
    (bubbles,) = re.findall(r"1F1B (\S+)%, ZB-H2 (\S+)%$", ended.output, re.MULTILINE)
    # With B and W of a stage: 3 units a microbatch, and a bubble of 3 (p - 1) units in 1F1B.
    m, p = 8, ranks
    assert float(bubbles[0]) == pytest.approx(100 * (p - 1) / (m + p - 1), abs=0.1)
    assert float(bubbles[1]) < float(bubbles[0]) / 2 or p == 1
    assert "in which ranks waited: " in ended.output
