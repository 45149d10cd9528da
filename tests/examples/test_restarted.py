"""Training under `--restarts`: killed at random moments, it comes to the same bits."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from ..mpi import warm as interpreting
from ..mpi.jobs import ROOT, finish, needs_mpi, of_interpreters, run, start

pytestmark = [*needs_mpi, pytest.mark.timeout(900)]

SCRIPT = str(ROOT / "examples" / "train_gpt.py")
MARK = "TEST_RESTARTED_MARK"
"""A variable of the ranks of one job."""
STEPS = 12
TINY = "--layers 2 --width 12 --batch 4 --microbatches 2 --rate 1e-2 --sample 0 --save-every 3"


def ranks_of(mark: str) -> list[int]:
    """The processes of ranks that run now."""
    ranks = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            variables = path.read_bytes().split(b"\0")
            is_rank = any(variable.startswith(b"PMI_RANK=") for variable in variables)
            if is_rank and f"{MARK}={mark}".encode() in variables:
                ranks.append(int(path.parent.name))
    return sorted(ranks)


def begin(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start a training on 2 ranks."""
    words = [SCRIPT, *TINY.split(), "--steps", str(STEPS), "--out", str(folder)]
    return start(
        0,
        ["-m", "cg.launch", "-n", "2", *options, interpreting.__file__, *words],
        variables={MARK: str(folder), **of_interpreters()},
        folder=folder.parent,
    )


def kill_at(job: subprocess.Popen[str], folder: Path, moment: float, which: int) -> bool:
    """Kill a rank of a job so many seconds from now; false if it ends before."""
    until = time.monotonic() + moment
    ranks: list[int] = []
    while not ranks or time.monotonic() < until:
        if job.poll() is not None:
            return False
        time.sleep(0.02)
        ranks = ranks_of(str(folder))
    with contextlib.suppress(ProcessLookupError):
        os.kill(ranks[which % len(ranks)], signal.SIGKILL)
    while set(ranks) & set(ranks_of(str(folder))):  # the launcher ends the others
        time.sleep(0.02)
    return True


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint, those of optimizers too, by name."""
    newest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text()
    assert newest.name == f"step-{STEPS:06d}"
    tensors = {}
    for file in newest.glob("*.pt"):
        saved = torch.load(file, weights_only=True)
        tensors |= saved["model"]
        for name, state in saved["optimizer"].items():
            tensors |= {f"{name}.{key}": value for key, value in state.items()}
    return tensors


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run that nothing interrupts, and the seconds that it took."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    (folder.parent / "nothing.py").touch()
    run(2, [str(folder.parent / "nothing.py")], seconds=120, warm=True)  # interpreters have started
    ended = finish(begin(folder), 240)
    assert ended.code == 0, ended.output
    return folder, ended.seconds


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_at_random_moments(kills: int, whole: tuple[Path, float], tmp_path: Path) -> None:
    """Two kills in each run, wherever they come; the checkpoint of an older run lies in its way."""
    draw, done = random.Random(kills), 0
    for number in itertools.count():
        if done >= kills:
            break
        folder = tmp_path / f"run{number}"
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / "latest").write_text("step-of-an-older-run")
        job = begin(folder, "--restarts", "2")
        moments = [draw.uniform(0.0, whole[1]) for _ in range(2)]
        count = sum(kill_at(job, folder, moment, draw.randrange(2)) for moment in moments)
        ended = finish(job, 240)
        done += count
        assert not ranks_of(str(folder)), "a rank is left"
        if "as in the start before, so it is not started again" in ended.output:
            continue  # both kills came upon the same step
        assert ended.code == 0, ended.output
        assert ended.output.count("It starts again, for time") == count, ended.output
        check_equal(folder, whole[0])


def check_equal(folder: Path, whole: Path) -> None:
    """Compare a run with one that nothing interrupted, bit for bit."""
    expected, actual = weights(whole), weights(folder)
    assert expected.keys() == actual.keys()
    assert len(expected) > 40
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name
    losses = [json.loads((run / "figures.json").read_text())["losses"] for run in (whole, folder)]
    assert losses[0] == losses[1]
