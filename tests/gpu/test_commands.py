"""What the documentation tells users to type runs on GPUs, and gives the losses of the host.

The commands are read from README.md, from pages and from docstrings (`documented.py`). They are
brought down to the GPUs that there are (`fitting.py`), and cut short (`playing.py`). A sample runs
on the host, too, and with --slow all of them; `--device` names another device for that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from .cases import Case, cases, without_room
from .documented import Shown
from .playing import Played, play, prepare, reference, skip_if_lacking, tolerance

pytestmark = pytest.mark.timeout(600)

GPUS = torch.cuda.device_count() or 2
"""Ranks to which commands are brought down; on a machine without GPUs, those of the host."""

TRAINED = [case for case in cases(GPUS) if case.command.name != "serve"]
"""Without the server's commands, which test_serving.py runs."""

SAMPLE = ("check-start.install-cg.launch-n2", "train-README-mpirun-n2", "clip-mpirun-n2-check")
"""The cheapest: a default run takes them on the host."""


def on_gpus(case: Case) -> Any:
    return pytest.param(case, marks=pytest.mark.gpu(case.command.ranks), id=case.id)


def too_large(line: Shown) -> Any:
    why = f"nothing is left of '{line.text}' on {GPUS} GPU{'s' * (GPUS > 1)}"
    marks = [pytest.mark.gpu, pytest.mark.skip(reason=why)]
    return pytest.param(None, marks=marks, id=f"{line.place}-needs-more-gpus")


def on_the_host(case: Case) -> Any:
    marks = [] if case.id in SAMPLE else [pytest.mark.slow]
    return pytest.param(case, marks=marks, id=case.id)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, which `check` writes when a command wants it."""
    return tmp_path_factory.mktemp("model")


Reference = Callable[[Case], Played]


@pytest.fixture(scope="module")
def on_one_process(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Reference:
    """The run that a case is compared with; cases share one if it is the same for them."""
    kept: dict[str, Played] = {}

    def run(case: Case) -> Played:
        other = reference(case)
        key = f"{other.command} {other.own}"
        if key not in kept:
            folder = tmp_path_factory.mktemp("reference")
            kept[key] = play(prepare(other, folder, model), folder, "cpu")
        return kept[key]

    return run


def check(case: Case, device: str, folder: Path, model: Path, on_one_process: Reference) -> None:
    """Run a case on a device; its losses are those of one process on the host."""
    skip_if_lacking(case)
    if "DIR" in case.command.arguments and not (model / "config.json").exists():
        from ..examples import tiny_model  # which imports transformers

        tiny_model.write(model)
    found = play(prepare(case, folder, model), folder, device)
    if found.losses:
        right = on_one_process(case).losses
        assert found.losses == pytest.approx(right, rel=tolerance(case.command)), found.output


@pytest.mark.parametrize("case", [*map(on_gpus, TRAINED), *map(too_large, without_room(GPUS))])
def test_on_gpus(case: Case, tmp_path: Path, model: Path, on_one_process: Reference) -> None:
    check(case, "cuda", tmp_path, model, on_one_process)


@pytest.mark.parametrize("case", [on_the_host(case) for case in TRAINED])
def test_on_the_host(
    case: Case,
    tmp_path: Path,
    model: Path,
    on_one_process: Reference,
    pytestconfig: pytest.Config,
) -> None:
    check(case, pytestconfig.getoption("--device"), tmp_path, model, on_one_process)
