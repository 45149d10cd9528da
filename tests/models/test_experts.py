"""Mixtures of experts of transformers train as plain transformers does, without an option."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.ir.ops import AllGatherRows, ReduceScatterRows
from cg.launch.world.world import use_world
from cg.passes.placement.choose_dispatch import Dispatch

from .families import LENGTH, VOCABULARY, transformers
from .training import TrainedPart, training_step

pytestmark = pytest.mark.timeout(300)

SIZES: dict[str, int] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
SHARED_GROUPS: dict[str, Any] = {
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4},
    "DeepseekV3": SHARED_GROUPS
    | {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    | {"v_head_dim": 4, "num_key_value_heads": 4},
    "Qwen2Moe": {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": {"num_experts": 4, "head_dim": 8},
    "Olmoe": {"num_experts": 4},
    "GraniteMoe": {"num_local_experts": 4},
    "Glm4Moe": SHARED_GROUPS | {"head_dim": 8},
}
QUICK = (("GptOss", "two stages"), ("Mixtral", "dp, ep"))
"""What a default run takes: biases and turned matrices in stages, and both kinds of cuts."""


def model_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = SIZES | FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**sizes, initializer_range=0.3)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    return model.double()  # type: ignore[no-any-return]


def train_plainly(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """Losses of three steps of transformers' own loop over experts, in one process."""
    model.set_experts_implementation("eager")  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
    losses = []
    for _ in range(3):
        logits = model(input_ids=ids, use_cache=False).logits
        losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return [loss.detach() for loss in losses]


INPUTS = "forward(moving)|forward(input_ids)|loss(moving)|loss(input_ids)|loss(labels)"

PLACES: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "two stages": (2, {}, {}),
    "dp": (1, {"dp": 2}, {}),
    "two stages, ep": (2, {"ep": 2}, {"*.experts.*": cg.cut(0, "ep")}),
    "dp, ep": (1, {"dp": 2, "ep": 2}, {"*.experts.*": cg.cut(0, "ep")}),
    "two stages, tokens over ep": (
        2,
        {"ep": 2},
        {"*.experts.*": cg.cut(0, "ep"), INPUTS: cg.cut(0, "ep")},
    ),
    "tokens over dp and ep": (
        1,
        {"dp": 2, "ep": 2},
        {"*.experts.*": cg.cut(0, "ep"), INPUTS: cg.cut(0, "dp", "ep")},
    ),
    "tokens over ep, tp": (
        1,
        {"ep": 2, "tp": 2},
        {"*.experts.*": cg.cut(0, "ep"), INPUTS: cg.cut(0, "ep")},
    ),
}


@pytest.mark.parametrize(
    ("family", "place"),
    [
        pytest.param(family, place, marks=[] if (family, place) in QUICK else [pytest.mark.slow])
        for family in FAMILIES
        for place in PLACES
    ],
)
def test_it_trains_as_plain_transformers(family: str, place: str) -> None:
    check_training(family, place, experts=None)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe"])
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_an_implementation_of_transformers(family: str, experts: str) -> None:
    check_training(family, "two stages", experts)


@pytest.mark.parametrize("family", ["Mixtral", pytest.param("DeepseekV3", marks=pytest.mark.slow)])
def test_an_exchange_of_rows_trains_as_plain_transformers(family: str) -> None:
    """Views of batches and lengths stand between experts and transfers."""
    check_training(family, "tokens over dp and ep", None, dispatch="exchange", rows=8)


def check_training(
    family: str, place: str, experts: str | None, dispatch: Dispatch = "auto", rows: int = 4
) -> None:
    stages, axes, plan = PLACES[place]
    model = model_of(family)
    plain = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(3, VOCABULARY, (2, rows, LENGTH), generator=generator)
    size = 2 ** len(axes)
    if "dp" in axes:
        plan = {INPUTS: cg.cut(0, "dp")} | plan
    with use_world(VirtualWorld(stages * size)):
        example = {"input_ids": ids, "use_cache": False}
        cuts = cg.cut_layers(model, stages, example=example, experts=experts)
        assert model.config._experts_implementation == (experts or "cg")  # type: ignore[union-attr]
        places = [
            cg.mesh(range(index * size, (index + 1) * size), **axes) if axes else index
            for index in range(stages)
        ]
        actors = [
            (TrainedPart.on(where, plan=plan) if axes else TrainedPart.on(where))(cuts, index)
            for index, where in enumerate(places)
        ]
        compiled = training_step(actors, cuts).lower(ids, labels).compile(dispatch=dispatch)
        used = {type(op) for program in compiled.module.programs for op in program.ops}
        assert (used >= {AllGatherRows, ReduceScatterRows}) == (dispatch == "exchange")
        losses = [compiled(ids, labels) for _ in range(3)]
    torch.testing.assert_close(losses, train_plainly(plain, ids, labels), rtol=1e-6, atol=1e-6)


def test_a_default_is_left_if_it_is_asked_for() -> None:
    """It is of as many operations, and `cg.cut_layers` takes it in every type."""
    tables = [str(cg.cut_layers(model_of("Mixtral"), 2, experts=e)) for e in ("cg", "grouped_mm")]
    assert tables[0] == tables[1]
    assert " 1  1" in tables[0]


def test_a_choice_of_before_is_left() -> None:
    model = model_of("Mixtral")
    model.set_experts_implementation("batched_mm")  # type: ignore[operator]
    cg.cut_layers(model, 1)
    assert model.config._experts_implementation == "batched_mm"  # type: ignore[union-attr]
    cg.cut_layers(model, 1, experts="cg")
    assert model.config._experts_implementation == "cg"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model", "experts", "message"),
    [
        (model_of("Mixtral"), "other", "no experts='other'; there are batched_mm, cg, .*eager, "),
        (model_of("Mixtral"), "eager", r"aten.nonzero.* depends on the data.* experts='cg' for a"),
        (nn.Linear(2, 2), "cg", "'cg' is asked for, and Linear has no experts of transformers"),
    ],
)
def test_implementations_that_are_refused(model: nn.Module, experts: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cg.cut_layers(model, 1, experts=experts)
