"""examples/finetune.py on a model of the shapes of Qwen2.5-0.5B, with random weights.

Its head and its embedding are one parameter of 136 million numbers, which the last stage borrows.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from .cases import Case
from .documented import Command, Shown, parse
from .playing import VARIABLES, play, prepare, reference, skip_if_lacking

pytestmark = pytest.mark.timeout(600)

GPUS = min(torch.cuda.device_count() or 2, 2)

TEXT = f"python -m cg.launch -n {GPUS} examples/finetune.py --model DIR --pp {GPUS}"
SHORT = (
    "--steps 7 --batch 2 --microbatches 2 --rate 1e-5 --evaluate-every 0 --save-every 7 --keep 1"
)


def case() -> Case:
    command = parse(TEXT)
    assert command is not None
    return Case(command, Shown(TEXT, "tests/gpu/test_real_shapes.py", 0), "")


def shortened(case: Case, folder: Path, model: Path) -> Command:
    command = prepare(case, folder, model)
    return replace(command, arguments=(*command.arguments, *SHORT.split()))


def check(size: str, device: str, folder: Path) -> None:
    """Losses are those of one process on the host. It leaves no files: they are of gigabytes."""
    skip_if_lacking(case())
    from benchmarks.one_gpu import folder as random_model
    from benchmarks.one_gpu import qwen2

    model = folder / "model"
    random_model.write(model, getattr(qwen2, size), 64, torch.float32, spare=1)
    found = []
    for name, each, where in (("run", case(), device), ("host", reference(case()), "cpu")):
        place = folder / name
        place.mkdir()
        found.append(play(shortened(each, place, model), place, where))
        shutil.rmtree(place)
    shutil.rmtree(model)
    assert len(found[0].losses) == 7
    assert found[0].losses == pytest.approx(found[1].losses, rel=1e-3), found[0].output


@pytest.mark.gpu(GPUS)
def test_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VARIABLES, "OMP_NUM_THREADS", "8")  # of the process on the host
    check("REAL", "cuda", tmp_path)


@pytest.mark.slow
def test_on_the_host(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """With small shapes, but as many layers of code."""
    check("SMALL", pytestconfig.getoption("--device"), tmp_path)
