"""examples/clip.py: towers on groups of different sizes, held against one process."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

from ..mpi.jobs import ROOT, Ended, needs_mpi, run

sys.path.insert(0, str(ROOT / "examples"))

import clip
from clip import Shape, Sizes

pytestmark = pytest.mark.timeout(150)
SLOW = pytest.mark.slow

SCRIPT = str(ROOT / "examples" / "clip.py")
TINY = ["--width", "16", "--vision", "1", "--text", "1", "--batch", "10"]
SIZES = Sizes(width=16, vision=2, text=1, features=8)


@pytest.mark.parametrize(
    "word", ["3+1", "all", *(pytest.param(each, marks=SLOW) for each in ("2+2", "1+1", "1+3"))]
)
def test_gradients_are_those_of_one_process(word: str) -> None:
    """Of a batch that the ranks of no group share evenly."""
    with use_world(VirtualWorld(4)):
        found = clip.differences(Shape.of(word, 4), SIZES, size=11)
    plain = clip.Vision(SIZES, 0.0), clip.Text(SIZES, 0.0)
    vision, text = len(list(plain[0].parameters())), len(list(plain[1].parameters()))
    ranks = (4, 4) if word == "all" else tuple(map(int, word.split("+")))
    heads = 4 if word == "all" else sum(ranks)
    assert len(found) == ranks[0] * vision + ranks[1] * text + heads
    assert max(found) < 1e-4


@pytest.mark.slow  # each shape is held against one process above, and one of them on MPI below
@pytest.mark.parametrize("ranks", [pytest.param(4, marks=needs_mpi)])
def test_every_shape_on_mpi_ranks(ranks: int, tmp_path: Path) -> None:
    ended = run(
        ranks, [SCRIPT, *TINY, "--table", "--steps", "12"], folder=tmp_path, seconds=120, warm=True
    )
    found = rows(ended)
    assert list(found) == ["3+1", "2+2", "1+1", "all"]
    for first, last in found.values():
        assert (first, last) == pytest.approx(found["3+1"], rel=1e-3)
        assert last < 0.95 * first


@pytest.mark.parametrize("ranks", [pytest.param(4, marks=needs_mpi)])
def test_gradients_on_mpi_ranks(ranks: int, tmp_path: Path) -> None:
    command = [SCRIPT, *TINY, "--check"]
    ended = run(ranks, command, folder=tmp_path, seconds=120, warm=True)
    assert ended.code == 0, ended.output
    (worst,) = re.findall(r"^3\+1: gradients differ .* by (\S+)$", ended.output, re.MULTILINE)
    assert float(worst) < 1e-4


def test_in_one_process(tmp_path: Path) -> None:
    ended = run(0, [SCRIPT, *TINY, "--steps", "2"], folder=tmp_path, seconds=120, warm=True)
    assert list(rows(ended)) == ["all"]


def rows(ended: Ended) -> dict[str, tuple[float, float]]:
    """The first and the last loss of each shape that a run has printed."""
    assert ended.code == 0, ended.output
    found = re.findall(r"^(\d\+\d|all) +(\S+) +(\S+) +\d+  ( +\d+%)+$", ended.output, re.MULTILINE)
    return {word: (float(first), float(last)) for word, first, last, _ in found}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("3-1", "a shape is all, or ranks for each tower as in 3[+]1, not '3-1'"),
        ("4+0", "not '4[+]0'"),
        ("3+2", "the shape 3[+]2 needs 5 ranks, and there are 4: start more"),
    ],
)
def test_shapes_that_are_none(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shape.of(word, 4)
