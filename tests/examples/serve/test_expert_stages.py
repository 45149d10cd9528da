"""Mixtures of experts are served on ranks that share experts, with the tokens of `generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ...mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from examples.serve import __main__ as command
from examples.serve import projections
from examples.serve.checks import check_ranks
from examples.serve.defaults import GIB, Given, Hardware, choose
from examples.serve.engine import Options, start
from examples.serve.gpt import GptConfig
from examples.serve.opening import open_model
from examples.serve.parts import Ways
from examples.serve.projections import Projection

from ...models.decoder_serving import generated, serve
from ...models.families import transformers
from ...models.test_experts import FAMILIES, SIZES, model_of

pytestmark = pytest.mark.timeout(300)

SHAPES = {"ep 2": (2, 1, 2), "ep 2, tp 2": (4, 2, 2), "two stages, ep 2": (4, 1, 2)}
"""For each the ranks, and those of a stage along `tp` and `ep`."""
QUICK = ("Mixtral", "ep 2, tp 2")


def config(family: str, **sizes: Any) -> Any:
    shape = SIZES | FAMILIES[family] | sizes
    return getattr(transformers, f"{family}Config")(**shape)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        pytest.param(family, shape, marks=[] if (family, shape) == QUICK else [pytest.mark.slow])
        for family in FAMILIES
        for shape in SHAPES
        if (family, shape) != ("DeepseekV3", "ep 2, tp 2")  # its keys and values have no heads
    ],
)
def test_ranks_that_share_experts_give_the_tokens_of_generate(
    family: str, shape: str, tmp_path: Path
) -> None:
    model = model_of(family).float()
    serve(model, generated(model), tmp_path, *SHAPES[shape])


@pytest.mark.parametrize("ways", [Ways(), Ways(ep=2), Ways(tp=2)])
def test_weights_are_packed_for_one_rank_alone(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share a part copy its tensors, and a packed one has nothing to copy."""
    monkeypatch.setattr(projections, "SMALL", 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    part: nn.Module = open_model(config("Mixtral")).build(range(1), torch.float32, ways)
    is_packed = any(isinstance(module, Projection) for module in part.modules())
    assert is_packed == (ways.ranks == 1)


@pytest.mark.parametrize(
    ("family", "ranks", "ways", "message"),
    [
        (
            "Mixtral",
            4,
            Ways(ep=3),
            "4 ranks by 3 for each stage do not fit .* --tp times --ep times --cp has",
        ),
        (
            "DeepseekV3",
            4,
            Ways(tp=2, ep=2),
            "4 ranks by 4 .* a model with 1 heads of keys .* --tp the heads of keys",
        ),
        ("Mixtral", 8, Ways(ep=8), "--ep 8 is more than the 4 experts of a layer"),
        ("Mixtral", 1, Ways(ep=0), "--tp 1, --ep 0 and --cp 1 are numbers of ranks"),
        (None, 2, Ways(ep=2), "--ep 2 spreads experts .* the model has none"),
    ],
)
def test_ranks_that_cannot_share_experts(
    family: str | None, ranks: int, ways: Ways, message: str
) -> None:
    """None is the family of a model without experts."""
    model = open_model(GptConfig() if family is None else config(family))
    with pytest.raises(ValueError, match=message):
        check_ranks(model, ranks, ways)
    with use_world(VirtualWorld(ranks)), pytest.raises(ValueError, match=message):
        start(model, Options(tp=ways.tp, ep=ways.ep))


def test_a_rank_has_room_beside_its_own_experts() -> None:
    """Along `tp` each rank has all experts."""
    model = open_model(
        config("Mixtral", hidden_size=512, intermediate_size=4096, num_local_experts=64)
    )
    assert model.experts is not None
    assert (model.experts.count, model.experts.numbers) == (64, 64 * 3 * 512 * 4096)
    hardware = Hardware("cuda", 8 * GIB, 16, has_triton=False)

    def weights(**ways: int) -> float:
        lines = choose(hardware, model, torch.bfloat16, Given(ranks=2, **ways)).reasons
        return float(lines[1].split("weights take ")[1].split(",")[0])

    whole = 2 * model.experts.numbers * 2 / GIB  # of two layers, in bfloat16
    assert weights(tp=2) == pytest.approx(whole, abs=0.06)
    assert weights(ep=2) == pytest.approx(whole / 2, abs=0.06)


def test_the_front_passes_it_on() -> None:
    options = command._parse(["-n", "4", "--tp", "2", "--ep", "2"])
    line = command.job(options, "DIR", command.switches.parse(""))
    assert "--ep=2" in line
