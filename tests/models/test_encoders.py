"""Models of transformers that are no decoders train in stages as in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

from .decoders import decoder
from .encoder_runs import EncoderStage, batches, train_in_stages
from .encoders import KINDS

pytestmark = pytest.mark.timeout(300)

SOME = (("clip", 2), ("t5", [3, 1]))
ALL = (
    *((kind, 2) for kind in KINDS),
    *((kind, 4) for kind in ("bart", "clip", "t5", "whisper")),
    *((kind, [3, 1]) for kind in ("bart", "t5")),
)


@pytest.mark.parametrize(
    ("kind", "stages"),
    [*SOME, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in SOME)],
)
def test_an_encoder_trains_as_in_one_process(kind: str, stages: int | Sequence[int]) -> None:
    train_in_stages(KINDS[kind], stages)


def test_layers_of_both_lists_are_in_the_order_in_which_they_run() -> None:
    cuts = cg.cut_layers(KINDS["bart"].model(), [1, 2, 1])
    head, _, *rows = str(cuts).splitlines()
    assert head == (
        "BartForConditionalGeneration: 4 layers in model.encoder.layers and model.decoder.layers, "
        "3 stages"
    )
    assert [stage.layers for stage in cuts] == [range(1), range(1, 3), range(3, 4)]
    assert "model.encoder.embed_positions" in rows[0]
    assert "model.decoder.embed_positions" in rows[1]
    assert rows[2].endswith("uses model.shared.weight of stage 0")


def test_lists_can_be_chosen() -> None:
    example = KINDS["t5"].inputs(torch.Generator(), 1)
    model = KINDS["t5"].model()
    cuts = cg.cut_layers(model, 2, example=example, layers="decoder.block")
    assert [stage.layers for stage in cuts] == [range(1), range(1, 2)]
    both = cg.cut_layers(model, 4, example=example, layers=["decoder.block", "encoder.block"])
    assert str(both).startswith("T5ForConditionalGeneration: 4 layers in encoder.block and deco")


def test_a_list_that_does_not_run_has_no_layers() -> None:
    """GIT has more parameters in its encoder of images, which does not run for texts alone."""
    cuts = cg.cut_layers(decoder("git"), 2)
    assert str(cuts).startswith("GitForCausalLM: 2 layers in git.encoder.layer, 2 stages")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("clip", "CLIPModel does not run on the example inputs input_ids: .*; give cg.cut_layers"),
        ("whisper", "does not know what WhisperForConditionalGeneration takes; give it inputs, as"),
    ],
)
def test_some_models_need_an_example(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cg.cut_layers(KINDS[kind].model(), 2)


def test_layers_that_are_left_out_at_random_are_refused() -> None:
    bart = KINDS["bart"]
    at_random = replace(bart, sizes={**bart.sizes, "decoder_layerdrop": 0.1})
    with pytest.raises(ValueError, match=r"cannot be traced: .* and layerdrop=0.0 for layers"):
        cg.cut_layers(at_random.model(), 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bart", "t5", "whisper"])
def test_checkpoints_of_stages_are_models(kind: str, tmp_path: Path) -> None:
    model: Any = KINDS[kind].model().float()
    model.save_pretrained(tmp_path / "first")
    weights = cg.pretrained(tmp_path / "first")
    weights.check(model)
    example = {
        name: value.float() if name == "input_features" else value
        for name, value in KINDS[kind].inputs(torch.Generator(), 1).items()
    }
    cuts = cg.cut_layers(model, 4, example=example)
    with use_world(VirtualWorld(4)):
        actors = [
            EncoderStage.on(index, init=weights)(KINDS[kind], cuts, index, {})  # type: ignore[attr-defined]
            for index in range(4)
        ]
        cg.save_checkpoint(tmp_path / "second", actors, like=tmp_path / "first")
    reopened = type(model).from_pretrained(tmp_path / "second")
    for name, parameter in model.named_parameters():
        assert torch.equal(reopened.get_parameter(name), parameter), name


def test_parts_hold_nothing_of_the_run_that_cut_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a fake tensor copies its mode, and that corrupts the heap."""

    def refuse(mode: FakeTensorMode, memo: dict[int, Any]) -> FakeTensorMode:
        raise AssertionError("a part holds a fake tensor")

    monkeypatch.setattr(FakeTensorMode, "__deepcopy__", refuse, raising=False)
    for kind in ("clip", "t5"):
        cuts = cg.cut_layers(KINDS[kind].model(), 2, example=batches(KINDS[kind])[0])
        copy.deepcopy([cuts, *map(cuts.part, range(2))])
