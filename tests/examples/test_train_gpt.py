"""examples/train_gpt.py on a tiny model: every way to start it, checkpoints, what it writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ..mpi.jobs import ROOT, Ended, needs_mpi, run

pytestmark = pytest.mark.timeout(150)
SLOW = pytest.mark.slow

SCRIPT = str(ROOT / "examples" / "train_gpt.py")
TINY = "--layers 4 --width 12 --batch 4 --microbatches 2 --rate 1e-2"


def train(
    ranks: int,
    folder: Path,
    options: str,
    *,
    steps: int = 2,
    virtual: int | None = None,
    warm: bool = True,
) -> Ended:
    """Train on so many MPI ranks, forked unless not `warm`; 0: one process plays `virtual` ones."""
    given = [*TINY.split(), "--steps", str(steps), "--out", str(folder), *options.split()]
    variables = {} if virtual is None else {"CG_RANKS": str(virtual)}
    return run(
        ranks, [SCRIPT, *given], variables=variables, folder=folder.parent, seconds=120, warm=warm
    )


def figures(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return found


def check_written(folder: Path, ended: Ended, ranks: int, steps: int = 2) -> list[float]:
    """Hold what a run has written against what it must; its losses."""
    assert ended.code == 0, ended.output
    written = figures(folder)
    assert written["ranks"] == ranks
    assert len(written["losses"]) == steps
    assert written["validation"][-1][0] == steps
    assert 3.0 < written["unigram_validation"] < 3.6
    assert 0.0 <= written["bubble"] < 1.0
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "a unigram model of the same bytes" in ended.output
    losses: list[float] = written["losses"]
    assert all(4.0 < loss < 7.0 for loss in losses)
    return losses


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Two steps in one process; its folder and its losses."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    ended = train(0, folder, f"--sample 8 --dump {folder / 'dumps'}", warm=False)
    assert "--- sample ---" in ended.output
    return folder, check_written(folder, ended, ranks=1)


def test_one_process(plain: tuple[Path, list[float]]) -> None:
    folder, _ = plain
    dumps = {file.name for file in (folder / "dumps").iterdir()}
    assert {"train.000.traced.cg", "train.grid.txt"} <= dumps
    checkpoint = folder / "checkpoints" / "step-000002"
    assert (folder / "checkpoints" / "latest").read_text() == checkpoint.name
    assert {file.name for file in checkpoint.iterdir()} == {"manifest.json", "stage0.pt"}


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=needs_mpi), pytest.param(3, marks=[*needs_mpi, SLOW])]
)
def test_mpi_ranks(ranks: int, plain: tuple[Path, list[float]], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    as_users_do = ranks == 1  # cold ranks beside each other: tests/launch/test_jobs.py
    ended = train(ranks, folder, f"--sample {8 if ranks == 3 else 0}", warm=not as_users_do)
    assert check_written(folder, ended, ranks) == pytest.approx(plain[1], rel=1e-4)
    assert ended.output.count("--- sample ---") == (ranks == 3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(8, marks=needs_mpi)])
def test_many_mpi_ranks(ranks: int, tmp_path: Path) -> None:
    """With a layer each."""
    options = f"--layers {ranks} --sample 0"
    alone = check_written(tmp_path / "alone", train(0, tmp_path / "alone", options), 1)
    ended = train(ranks, tmp_path / "run", options)
    assert check_written(tmp_path / "run", ended, ranks) == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("schedule", [pytest.param("interleaved", marks=SLOW), "dualpipe-v"])
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=needs_mpi)])
def test_two_stages_on_each_rank(
    ranks: int, schedule: str, plain: tuple[Path, list[float]], tmp_path: Path
) -> None:
    ended = train(ranks, tmp_path / "run", f"--sample 0 --schedule {schedule}")
    assert check_written(tmp_path / "run", ended, ranks) == pytest.approx(plain[1], rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        "--dp 2 --tp 2 --fsdp --sample 8",
        "--dp 2 --schedule zb-h1 --fsdp task --sample 0",
        pytest.param("--tp 2 --sample 8", marks=SLOW),
        pytest.param("--dp 2 --tp 1 --schedule dualpipe-v --sample 0", marks=SLOW),
    ],
)
def test_groups_of_ranks(options: str, plain: tuple[Path, list[float]], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = train(0, folder, options, virtual=4)
    assert check_written(folder, ended, ranks=4) == pytest.approx(plain[1], rel=1e-4)
    assert figures(folder)["validation"][-1] == pytest.approx(
        figures(plain[0])["validation"][-1], rel=1e-4
    )
    assert not (folder / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--dp 2 --tp 2 --fsdp --float8", "--float8 rowwise"])
def test_layers_in_float8(options: str, tmp_path: Path) -> None:
    """Of a width that float8 takes."""
    found, expected = (
        check_written(folder, train(0, folder, f"--width 48 --sample 0 {more}", virtual=4), ranks=4)
        for folder, more in ((tmp_path / "run", options), (tmp_path / "plain", ""))
    )
    assert found == pytest.approx(expected, rel=1e-2)
    assert found != pytest.approx(expected, rel=1e-6), "it computes in float8"


@pytest.mark.parametrize("ranks", [pytest.param(4, marks=needs_mpi)])
def test_groups_of_mpi_ranks(ranks: int, plain: tuple[Path, list[float]], tmp_path: Path) -> None:
    """Two stages, each on a group of two."""
    ended = train(ranks, tmp_path / "run", "--dp 2 --sample 0 --fsdp step")
    assert check_written(tmp_path / "run", ended, ranks) == pytest.approx(plain[1], rel=1e-4)


@pytest.mark.parametrize("after", [pytest.param(3, marks=[*needs_mpi, SLOW]), 0])
def test_resuming_on_other_ranks(after: int, saved: Path, tmp_path: Path) -> None:
    """A run of 2 ranks goes on, on others, as if it had not been interrupted."""
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    (folder / "checkpoints" / "latest").write_text("step-000003")
    whole = figures(saved)["losses"]
    ended = train(after, folder, "--resume --save-every 3 --sample 8", steps=5)
    assert ended.output.count("--- sample ---") == 1
    assert check_written(folder, ended, max(after, 1), steps=5) == pytest.approx(whole, rel=1e-4)
    assert (folder / "checkpoints" / "latest").read_text() == "step-000005"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of 5 steps on 2 ranks, with a checkpoint after the third."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    options = "--schedule gpipe --save-every 3 --sample 0"
    ended = train(0, folder, options, steps=5, virtual=2)
    check_written(folder, ended, ranks=2, steps=5)
    return folder
