"""Mixtures of experts of transformers train as plain transformers does, without an option."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.ir.ops import AllGatherRows, ReduceScatterRows
from cg.launch.world.world import use_world
from cg.passes.placement.choose_dispatch import Dispatch

from .decoder_runs import EXAMPLE, DecoderStage, train, train_plainly, two_stages
from .decoders import VOCABULARY, decoder
from .families import transformers

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
QUICK = (("GptOss", "two stages"), ("Mixtral", "ep 2, stored over dp 2 and ep 2"))
"""What a default run takes: biases and turned matrices in stages, and all kinds of cuts."""


def model_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = SIZES | FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**sizes, initializer_range=0.3)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    correct_choices(model)
    return model.double()  # type: ignore[no-any-return]


def correct_choices(model: nn.Module) -> None:
    """Give routers that have correction biases some that change their choices."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.5, 0.5)


ROWS = "forward(moving)|forward(ids)|loss(moving)|loss(ids)"
TOKENS = cg.cut(0, "dp", "ep")

PLACES: dict[str, tuple[int, dict[str, int], dict[str, Any], Any]] = {
    "two stages": (2, {}, {}, cg.whole),
    "dp 2": (1, {"dp": 2}, {ROWS: cg.cut(0, "dp")}, cg.whole),
    "dp 2, ep 2, tokens over dp": (1, {"dp": 2, "ep": 2}, {ROWS: cg.cut(0, "dp")}, cg.whole),
    "pp 2, ep 2, whole tokens": (2, {"ep": 2}, {}, cg.whole),
    "pp 2, ep 2": (2, {"ep": 2}, {ROWS: cg.cut(0, "ep")}, cg.whole),
    "ep 2, dp 2": (1, {"dp": 2, "ep": 2}, {ROWS: TOKENS}, cg.whole),
    "ep 2, tp 2": (1, {"ep": 2, "tp": 2}, {ROWS: cg.cut(0, "ep")}, cg.whole),
    "ep 2, stored over dp 2 and ep 2": (1, {"dp": 2, "ep": 2}, {ROWS: TOKENS}, TOKENS),
}
"""For each the stages, the mesh of each of them, the cuts of arguments, and `store`."""


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
    check_training(family, "ep 2, dp 2", None, dispatch="exchange", microbatches=1)


def check_training(
    family: str,
    place: str,
    experts: str | None,
    dispatch: Dispatch = "auto",
    microbatches: int = 2,
) -> None:
    """Three steps have the losses, and each of them all gradients, of one process."""
    stages, axes, rows, store = PLACES[place]
    model = model_of(family)
    plain = train_plainly(model)
    size, axes = math.prod(axes.values()), {"tp": 1} | axes if "ep" in axes else axes
    with use_world(VirtualWorld(stages * size)):
        cuts = cg.cut_layers(model, stages, example=EXAMPLE, experts=experts)
        assert model.config._experts_implementation == (experts or "cg")  # type: ignore[union-attr]
        plan = cg.plan(rows)
        if "ep" in axes:
            plan = plan | cg.plans.hf(model, batch=None, experts="ep")
        on = DecoderStage.on  # type: ignore[attr-defined]
        actors = [
            on(cg.mesh(range(i * size, (i + 1) * size), **axes), plan=plan, store=store)(cuts, i)
            if axes
            else on(i)(cuts, i)
            for i in range(stages)
        ]
        compiled = train(actors, cuts, microbatches, plain, dispatch)
    used = {type(op) for program in compiled.module.programs for op in program.ops}
    assert (used >= {AllGatherRows, ReduceScatterRows}) == (dispatch == "exchange")


class JoinedExperts(nn.Module):
    """In the place of the experts of DBRX, which loops over those that the data chooses."""

    def __init__(self, loop: Any) -> None:
        super().__init__()
        self.mlp, self.experts = loop.mlp, loop.num_experts

    def forward(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        w1, v1, w2 = (
            weight.view(self.experts, -1, x.shape[-1])
            for weight in (self.mlp.w1, self.mlp.v1, self.mlp.w2)
        )
        rows = x.flatten(0, -2)
        gate = self.mlp.activation_fn(cg.expert_linear(rows, w1, ids))
        h = cg.expert_linear(gate * cg.expert_linear(rows, v1, ids), w2.transpose(1, 2), ids)
        return (h * shares.unsqueeze(-1)).sum(1).view(x.shape)


def test_a_module_of_products_takes_the_place_of_a_loop() -> None:
    """Both train, for the loop is traced as well."""
    model = decoder("dbrx")
    plain = train_plainly(model)
    two_stages(model, plain)
    for block in model.transformer.blocks:
        block.ffn.experts = JoinedExperts(block.ffn.experts)
    two_stages(model, plain)


def test_the_loop_of_transformers_is_traced() -> None:
    model = decoder("mixtral")
    with use_world(VirtualWorld(1)):
        cuts = cg.cut_layers(model, 1, example=EXAMPLE, experts="eager")
        train([DecoderStage.on(0)(cuts, 0)], cuts, 2, train_plainly(model))  # type: ignore[attr-defined]


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
        (nn.Linear(2, 2), "cg", "'cg' is asked for, and Linear has no experts of transformers"),
    ],
)
def test_implementations_that_are_refused(model: nn.Module, experts: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cg.cut_layers(model, 1, experts=experts)
