"""Parts of examples/train_gpt.py, in this process: checkpoints, and what the command line says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import cg

from ..mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import checkpoints
import train_gpt
from train_gpt import Config, Stage, cut, homes

from ..worlds import virtual_world

CONFIG = Config(layers=4, width=12)
STEP: Any = cg.trace(lambda x: x)
"""Has a state, as a compiled step."""

_world = virtual_world(2)


def stages(number: int, layers: int = 4) -> list[Any]:
    """A model in so many stages, on two ranks."""
    parts = enumerate(cut(layers, number))
    config = Config(layers=layers, width=12)
    return [Stage.on(i % 2)(config, part, 0, 1e-3, 10) for i, part in parts]


def parameters(actors: list[Any]) -> dict[str, torch.Tensor]:
    """All parameters by name."""
    return {n: p.detach() for a in actors for n, p in a.local.named_parameters()}


def change(actors: list[Any]) -> None:
    """Take an optimizer step on gradients that are all one."""
    for actor in actors:
        for parameter in actor.local.parameters():
            parameter.grad = torch.ones_like(parameter)
        actor.local.update()


def test_a_checkpoint_fits_any_cut(tmp_path: Path) -> None:
    two, three = stages(2), stages(3)
    change(two)
    checkpoints.save(tmp_path, two, STEP, 1, {"losses": [1.0]})
    assert checkpoints.load(tmp_path, three, STEP) == (1, {"losses": [1.0]})
    for _ in range(2):
        wanted, found = parameters(two), parameters(three)
        assert wanted.keys() == found.keys()
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)
        # Once more, now with the optimizer's moments and the rate that were saved.
        change(two)
        change(three)


@pytest.mark.parametrize("where", ["torch.save", "Path.rename", "os.replace", "json.dumps"])
def test_a_crash_while_saving_leaves_the_checkpoint_before(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors = stages(2)
    checkpoints.save(tmp_path, actors, STEP, 1, {})
    wanted = {name: value.clone() for name, value in parameters(actors).items()}
    change(actors)

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("no space left on the device")

    with monkeypatch.context() as broken:
        broken.setattr(f"checkpoints.{where}", fail)
        with pytest.raises(OSError, match="no space left"):
            checkpoints.save(tmp_path, actors, STEP, 2, {})
    assert checkpoints.load(tmp_path, actors, STEP)[0] == 1
    found = parameters(actors)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)

    change(actors)
    checkpoints.save(tmp_path, actors, STEP, 2, {})  # what the crash has left is no hindrance
    assert checkpoints.load(tmp_path, actors, STEP)[0] == 2


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="run without --resume first"):
        checkpoints.load(tmp_path, stages(2), STEP)


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, stages(2), STEP, 1, {})
    with pytest.raises(KeyError, match=r"the checkpoint has no blocks\.4.*was it of another model"):
        checkpoints.load(tmp_path, stages(2, layers=5), STEP)


@pytest.mark.parametrize("schedule", cg.schedules.names())
def test_stages_lie_as_the_schedule_wants_them(schedule: str) -> None:
    for ranks in (1, 2, 5):
        stage_ranks = tuple(homes(schedule, ranks))
        assert set(stage_ranks) == set(range(ranks))
        assert cg.schedules.by_name(schedule)(cg.schedules.Pipeline(stage_ranks, 4))
    per_rank = {"interleaved": 2, "looped-bfs": 2, "zb-v": 2, "dualpipe-v": 2}.get(schedule, 1)
    assert len(homes(schedule, 5)) == 5 * per_rank


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--layers 1", "'1f1b' on 2 ranks has 2 stages and needs at least as many --layers, not 1"),
        ("--schedule zb-v --layers 3", "'zb-v' on 2 ranks has 4 stages and needs at least"),
        ("--batch 5 --microbatches 2", "--batch 5 does not divide into 2 microbatches"),
        ("--schedule none", "invalid choice: 'none' (choose from"),
        ("--microbatches 0", "--microbatches must be at least 1"),
        ("--save-every 0", "--save-every must be at least 1"),
        ("--steps 0", "--steps must be at least 1"),
        ("--tp 4", "--tp 4 does not divide the 6 heads"),
        ("--tp 3", "--tp 3 and --dp 1 make groups of 3 ranks, of which 2 ranks are no whole"),
        ("--dp 0", "--dp must be at least 1"),
        ("--dp 2 --resume", "--resume needs checkpoints, and groups of ranks"),
        ("--width 13", "--width 13 does not divide into 6 heads"),
    ],
)
def test_bad_arguments(
    arguments: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        train_gpt.parse()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("which", ["manifest.json", "*.pt"])
def test_a_damaged_checkpoint(which: str, tmp_path: Path) -> None:
    actors = stages(2)
    checkpoints.save(tmp_path, actors, STEP, 1, {})
    checkpoints.save(tmp_path, actors, STEP, 2, {})
    file = next((tmp_path / "step-000002").glob(which))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"step-000002.*is damaged.*there are step-000001, step-"):
        checkpoints.load(tmp_path, actors, STEP)
