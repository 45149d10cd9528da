"""Models of transformers on a mesh, by the plans that they bring, equal eager."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from cg.tracer.function.groups.plans import hf

from ..test_models import TINY, LanguageModel, causal_lm
from .joint_tools import compare
from .op_cases import ints
from .simulation import mesh

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.timeout(300)]

GRID = mesh(dp=2, tp=2)
TOKENS = torch.randint(31, (3, 7), generator=torch.Generator().manual_seed(0))
PADDING = torch.ones(3, 7, dtype=torch.int64).index_fill(1, torch.tensor([6]), 0)
SLOW = pytest.mark.slow  # they differ from others by little


def language_model(family: str, **config: Any) -> LanguageModel:
    if family == "gpt2":
        return LanguageModel(causal_lm(family, **config)).double()
    return LanguageModel(causal_lm(family, **{"num_key_value_heads": 2, **config})).double()


@pytest.mark.parametrize(
    ("family", "attention", "layers"),
    [
        ("llama", "sdpa", 2),
        ("gpt2", "eager", 2),
        pytest.param("qwen2", "sdpa", 1, marks=SLOW),
        pytest.param("qwen3", "sdpa", 1, marks=SLOW),
        pytest.param("mistral", "sdpa", 1, marks=SLOW),
        pytest.param("gpt2", "sdpa", 2, marks=SLOW),
        pytest.param("llama", "eager", 2, marks=SLOW),
        pytest.param("qwen2", "eager", 2, marks=SLOW),
        pytest.param("qwen3", "eager", 2, marks=SLOW),
        pytest.param("mistral", "eager", 2, marks=SLOW),
    ],
)
def test_language_models(family: str, attention: str, layers: int) -> None:
    """Weights and vocabulary are cut, so is the batch; dropout draws what it draws in eager."""
    number = "n_layer" if family == "gpt2" else "num_hidden_layers"
    actor = language_model(family, attn_implementation=attention, **{number: layers})
    plan = hf(actor.model)
    run = compare(actor, "loss", plan, GRID, [TOKENS, PADDING], ["dp,-", "dp,-"], tolerance=1e-4)
    assert {change.value for change in run.changes} == {"reduce", "slice"}
    whole = [t for t in run.propagation.transfers if t.after.node.meta["val"].numel() == 3 * 7 * 16]
    # Megatron's count: two in each direction of a layer, one of the head, and one of the embedding,
    # which the plans of some versions of transformers leave whole.
    weight = actor.model.get_input_embeddings().weight
    path = next(name for name, each in actor.named_parameters() if each is weight)
    assert len(whole) == 4 * layers + 1 + (plan.of_tensor(path) is not None)
    keys = Counter(id(part.bodies) for part in run.cut.parts)
    assert layers == 1 or max(keys.values()) > 1, "equal layers have equal parts"


@pytest.mark.parametrize(
    ("family", "cut", "form"),
    [
        ("llama", "-,cp~", "ring"),
        pytest.param("gpt2", "-,cp", None, marks=SLOW),
        pytest.param("qwen3", "-,cp", "gather", marks=SLOW),
    ],
)
def test_dropout_within_attention_over_cut_tokens(family: str, cut: str, form: str | None) -> None:
    """GPT-2 drops of embeddings and of layers' results, too."""
    config: dict[str, Any] = {"num_hidden_layers": 1, "attention_dropout": 0.3}
    actor = language_model(
        family, attn_implementation="sdpa", **({"n_layer": 1} if family == "gpt2" else config)
    )
    compare(
        *(actor, "logits", {}, mesh(cp=2), [TOKENS, PADDING], [cut, "-,-"]),
        tolerance=1e-6,
        attention=form,
    )


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=SLOW)])
def test_two_axes_for_fewer_heads_of_keys_than_ranks(attention: str) -> None:
    actor = language_model("llama", num_hidden_layers=1, attn_implementation=attention)
    plan = hf(actor.model, axis=("kv", "rep"))
    inputs = [TOKENS, PADDING]
    run = compare(actor, "loss", plan, mesh(kv=2, rep=2), inputs, ["-,-", "-,-"], tolerance=1e-4)
    assert {change.value for change in run.changes} == {"reduce", "slice"}


class Encoder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.double()

    def text(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.model(tokens, attention_mask=mask)[0]
        return made

    def image(self, pixels: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.model(pixels)[0]
        return made


def encoder(family: str, attention: str) -> Encoder:
    torch.manual_seed(0)
    sizes = {k: v for k, v in TINY.items() if k != "num_key_value_heads"}
    sizes |= {"num_hidden_layers": 1, "attn_implementation": attention}
    if family == "bert":
        return Encoder(transformers.BertModel(transformers.BertConfig(**sizes)))
    if family == "clip text":
        special = {"eos_token_id": 30, "bos_token_id": 29, "pad_token_id": 28}
        config = transformers.CLIPTextConfig(**sizes, projection_dim=8, **special)
        return Encoder(transformers.CLIPTextModelWithProjection(config))
    del sizes["vocab_size"], sizes["max_position_embeddings"]
    pixels = {"image_size": 16, "patch_size": 8}
    config = transformers.CLIPVisionConfig(**sizes, **pixels, projection_dim=8)
    return Encoder(transformers.CLIPVisionModelWithProjection(config))


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=SLOW)])
@pytest.mark.parametrize("family", ["bert", "clip text", "clip vision"])
def test_encoders_of_a_cut_batch(family: str, attention: str) -> None:
    """They bring no plan; gradients of weights are sums over ranks."""
    actor = encoder(family, attention)
    if family == "clip vision":
        run = compare(actor, "image", {}, GRID, [ints(3, 3, 16, 16)], ["dp,-,-,-"], tolerance=1e-4)
    else:
        inputs = [TOKENS, PADDING]
        run = compare(actor, "text", {}, GRID, inputs, ["dp,-", "dp,-"], tolerance=1e-4)
    # That of positions, which rows share; what the others add up stays a sum over ranks.
    assert Counter(change.value for change in run.changes)["reduce"] == 1
