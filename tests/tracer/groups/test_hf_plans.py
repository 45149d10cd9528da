"""Sharding plans of models of transformers: what their plans say, and what cannot be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import cg
from cg.ir.layout import Cut, Layout
from cg.tracer.function.groups import plans
from cg.tracer.function.groups.plans import hf
from cg.tracer.values.mesh import mesh
from cg.tracer.values.pieces import lay_out
from cg.tracer.values.plan import Sharding, ShardingPlan, cut, whole

from ...sampling import scale

GRID = mesh(dp=2, tp=2)


class Attention(nn.Module):
    def __init__(self, heads: int, keys: int) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(8, heads * 4), nn.Linear(heads * 4, 8)
        self.k_proj, self.v_proj = nn.Linear(8, keys * 4), nn.Linear(8, keys * 4)


class Layer(nn.Module):
    def __init__(self, heads: int, keys: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(heads, keys), nn.LayerNorm(8)
        self.gate_up, self.fused = nn.Linear(8, 12), nn.Linear(8, 6)
        self.experts = nn.Parameter(torch.zeros(3, 12, 8))


class Base(nn.Module):
    def __init__(self, heads: int, keys: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Layer(heads, keys) for _ in range(2))


class Model(nn.Module):
    """The attributes of a model of transformers that hold its plans."""

    base_model_prefix = "model"

    def __init__(self, heads: int = 4, keys: int = 2, **more: str) -> None:
        super().__init__()
        self.model, self.head = Base(heads, keys), nn.Linear(8, 16)
        self._tp_plan = {"head": "colwise_rep", "model.embed": "embedding_rowwise"}
        projections = {f"layers.*.attention.{name}_proj": "colwise" for name in "qkv"}
        own = {
            **projections,
            "layers.*.attention.o_proj": "rowwise",
            "layers.*.gate_up": "packed_colwise",
            "layers.*.fused": "colwise_gather_output",
            "layers.*.norm": "replicated_with_grad_allreduce",
            "layers.*.experts": "packed_colwise",
            **more,
        }
        self.config = SimpleNamespace(
            base_model_tp_plan=own, num_attention_heads=heads, num_key_value_heads=keys
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids


def layouts(actor: nn.Module, plan: ShardingPlan, grid=GRID) -> dict[str, str]:
    found = lay_out(actor, plan, whole, grid)
    return {
        each.path: ",".join(map(str, each.layout.cuts)) for each in found if each.layout is not None
    }


def test_styles() -> None:
    found = layouts(Model(), hf(Model()))
    tp, packed, none = (str(each) for each in (Cut(("tp",)), Cut(("tp",), 2), Cut()))
    first = {
        path.removeprefix("model.layers.0."): text
        for path, text in found.items()
        if not path.startswith("model.layers.1.")
    }
    assert first == {
        **{f"attention.{name}_proj.weight": f"{tp},{none}" for name in "qkv"},
        **{f"attention.{name}_proj.bias": tp for name in "qkv"},
        "attention.o_proj.weight": f"{none},{tp}",
        "gate_up.weight": f"{packed},{none}",
        "gate_up.bias": packed,
        "experts": f"{none},{packed},{none}",
        "model.embed.weight": f"{tp},{none}",
        "head.weight": f"{tp},{none}",
        "head.bias": tp,
    }
    assert len(found) == 2 * len(first) - 3, "both layers are cut alike"


GATHERED = ("colwise_gather_output", "rowwise_rep", "rowwise_split_input")


@pytest.mark.parametrize("style", [*GATHERED, "embedding_colwise"])
def test_layers_between_whole_tensors_are_whole(style: str) -> None:
    model = Model(embed=style, **{"layers.*.fused": style})
    model._tp_plan = {}
    cut_paths = layouts(model, hf(model))
    assert cut_paths
    assert not any("embed" in path or "fused" in path for path in cut_paths)


@pytest.mark.parametrize("style", GATHERED)
def test_the_layer_that_makes_logits_is_cut_along_the_vocabulary(style: str) -> None:
    model = Model()
    model._tp_plan = {"head": style}
    assert layouts(model, hf(model))["head.weight"] == f"{Cut(('tp',))},{Cut()}"


def test_a_part_of_a_model_has_a_part_of_its_plan() -> None:
    class LastLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = Model().model.layers[1:]

    plan = hf(Model())
    names = [name for name, _ in LastLayers().named_parameters()]
    plan.check(LastLayers, names, [("forward", "h")])
    projection = layouts(LastLayers(), plan)["layers.0.attention.q_proj.weight"]
    assert projection == f"{Cut(('tp',))},{Cut()}"
    with pytest.raises(ValueError, match="the plan of Model matches no tensor of Linear; its tens"):
        plan.check(nn.Linear, ["weight", "bias"], [("forward", "input_ids")])


def test_plans_are_joined_and_the_first_counts() -> None:
    plan = ShardingPlan.of({"head.*": whole, "loss(ids)": cut(0, "dp")}) | hf(Model(), batch="rows")
    assert plan.of_tensor("head.weight") == whole
    assert plan.of_tensor("actor.model.embed.weight") == cut(0, "tp")
    assert plan.of_argument("loss", "ids") == cut(0, "dp")
    assert plan.of_argument("forward", "input_ids") == cut(0, "rows")
    assert (hf(Model(), batch=None)).of_argument("forward", "input_ids") in (None, whole)
    with pytest.raises(ValueError, match="'loss\\(ids\\)' matches nothing of Model"):
        plan.check(Model, ["head.weight"], [("forward", "input_ids")])


def test_fewer_heads_of_keys_than_ranks() -> None:
    model = Model(heads=4, keys=2)
    with pytest.raises(
        ValueError, match=r"k_proj.weight' has 2 heads of keys and values"
    ) as caught:
        layouts(model, hf(model), mesh(tp=4))
    message = str(caught.value)
    assert "cannot be cut to 4 equal pieces along tp" in message
    assert "make two axes of 'tp', such as cg.mesh(kv=2, rep=...)" in message
    assert 'cg.plans.hf(model, axis=("kv", "rep"))' in message
    found = layouts(model, hf(model, axis=("kv", "rep")), mesh(kv=2, rep=2))
    assert found["model.layers.0.attention.k_proj.bias"] == str(Cut(("kv",)))
    assert found["model.layers.0.attention.q_proj.bias"] == str(Cut(("kv", "rep")))
    with pytest.raises(ValueError, match="use an axis whose size divides the number of heads"):
        layouts(Model(4, 3), hf(Model(4, 3)), mesh(tp=3))


def test_heads_may_be_cut_further_where_they_rest() -> None:
    plan = hf(Model(keys=2), batch=None)
    found = lay_out(Model(keys=2), plan, cut(0, "dp"), mesh(tp=2, dp=4))
    by_path = {each.path: each.layout for each in found}
    assert by_path["model.layers.0.attention.k_proj.bias"] == Layout((Cut(("tp", "dp")),))


def test_what_has_a_style_that_is_not_known_or_cannot_be_traced() -> None:
    model = Model(**{"layers.*.fused": "sideways"})
    message = r"the plan of Model gives 'model.layers.\*.fused' the style 'sideways', which"
    with pytest.raises(ValueError, match=message):
        hf(model)
    with pytest.raises(ValueError, match=r"no plan can be derived for Linear, since its forward"):
        hf(nn.Linear(2, 2))


def test_experts_stay_whole_and_a_note_says_so() -> None:
    model = Model(
        **{"layers.*": "moe_tp_experts", "layers.*.experts": "packed_colwise"},
    )
    plan = hf(model, batch=None)
    assert not any(".experts" in path for path in layouts(model, plan))
    assert str(plan).endswith("# layers.*: each rank has all experts")


class StackedExperts(nn.Module):
    """What transformers' modules of experts have."""

    has_gate, has_bias, is_transposed = True, True, False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.up_bias = nn.Parameter(torch.zeros(4, 8, 8)), nn.Parameter(torch.zeros(4, 8))


def test_experts_are_spread_over_an_axis_that_cuts_the_batch_too() -> None:
    model = Model(**{"layers.*.mixture": "moe_tp_experts"})
    for layer in model.model.layers:
        layer.mixture = StackedExperts()
    cuts = layouts(model, hf(model, experts="ep"), mesh(dp=2, tp=2, ep=2))
    assert cuts["model.layers.1.mixture.up"] == "ep,,"
    assert cuts["model.layers.0.mixture.up_bias"] == "ep,"
    plan = str(hf(model, experts="ep"))
    assert '"forward(input_ids)": cg.cut(0, "dp", "ep"),' in plan
    assert "each rank has all experts" not in plan
    assert '"forward(input_ids)": cg.cut(0, "ep"),' in str(hf(model, batch=None, experts="ep"))
    with pytest.raises(ValueError, match="Model has no module with the weights of experts"):
        hf(Model(), experts="ep")


def test_a_sequence_is_cut_where_a_token_is_enough() -> None:
    """What is beyond a rank's tokens is needed of masks, positions and labels."""
    plan = hf(Model(), sequence="cp")
    assert plan.of_argument("forward", "input_ids") == cut(0, "dp") & cut(1, "cp")
    assert plan.of_argument("forward", "labels") == cut(0, "dp")
    assert hf(Model(), batch=None, sequence="cp").of_argument("forward", "labels") in (None, whole)


def test_an_axis_of_weights_cuts_tokens_between_their_layers() -> None:
    plan = hf(Model(), sequence=("cp", "tp"))
    assert plan.sequence == ("tp",)
    assert plan.of_argument("forward", "input_ids") == cut(0, "dp") & cut(1, "cp")
    assert plan.of_argument("forward", "inputs_embeds") == cut(0, "dp") & cut(1, "cp", "tp")
    assert str(plan).splitlines()[-1] == '}, sequence=["tp"])'
    assert eval(str(plan), {"cg": cg}).sequence == ("tp",)
    assert (cg.plan({}) | plan).sequence == ("tp",)
    with pytest.raises(ValueError, match=r"sequence= names 'tp', but the mesh dp=2 .* has none"):
        lay_out(nn.Linear(2, 2), cg.plan({}, sequence="tp"), whole, mesh(dp=2))
    with pytest.raises(ValueError, match=r"cut weights stand last: give \('cp', 'tp'\)"):
        hf(Model(), sequence=("tp", "cp"))


def test_a_plan_is_printed_as_python() -> None:
    plan = hf(Model(), batch=None)
    text = str(plan)
    assert '    "*layers.*.gate_up.weight": cg.cut(0, "tp", blocks=2),' in text.splitlines()
    assert eval(text, {"cg": cg}).items == tuple(
        (pattern, Sharding(sharding.cuts)) for pattern, sharding in plan.items
    )
    both = cut(0, "dp") & cut(1, "tp", "ep")
    assert str(both) == 'cg.cut(0, "dp") & cg.cut(1, "tp", "ep")'


def test_each_style_of_the_library_is_known() -> None:
    """Those of its registry; with `--slow` those that all its configurations name, too."""
    transformers = pytest.importorskip("transformers")
    tensor_parallel = pytest.importorskip("transformers.integrations.tensor_parallel")
    styles = set(tensor_parallel.ALL_PARALLEL_STYLES)
    kinds = tuple(transformers.CONFIG_MAPPING) if scale() > 1 else ("llama4", "hy_v4", "qwen3_next")
    for kind in kinds:
        named = transformers.CONFIG_MAPPING[kind].base_model_tp_plan
        styles |= set((named or {}).values())
    assert styles <= {*plans._STYLES, *plans._OF_EXPERTS, *plans._OF_EXCHANGES}
