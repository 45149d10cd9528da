"""Unchanged models of transformers train on meshes by `cg.plans.hf` as they do in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

from ..test_models import causal_lm
from .training import cut_out, region_of

pytest.importorskip("transformers")
pytestmark = [pytest.mark.timeout(300)]

SLOW = pytest.mark.slow  # they differ from others by little
ROWS = cg.plan({"loss(input_ids)|loss(labels)": cg.cut(0, "dp")})


def model_of(family: str, attention: str, **config: Any) -> nn.Module:
    """In float64, but for what the library computes in float32 in any case: norms and angles."""
    if family == "gpt2":
        config = {"n_layer": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **config}
    else:
        config = {"num_hidden_layers": 1, "num_key_value_heads": 2, **config}
    return causal_lm(family, attn_implementation=attention, **config).double()


@cg.actor
class LanguageModel(nn.Module):
    """A model as transformers makes it, its optimizer, and the gradients of the last update."""

    def __init__(self, family: str, attention: str, **config: Any) -> None:
        super().__init__()
        self.model = model_of(family, attention, **config)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        self.found: dict[str, torch.Tensor] = {}

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, use_cache=False).logits

    def loss(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, labels=labels, use_cache=False).loss

    def update(self) -> None:
        self.found = {n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None}
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(actor: Any, plain: Any, steps: int = 3) -> None:
    """Train both, and compare logits, losses, gradients and parameters after each step."""

    @cg.trace
    def step(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = actor.forward(tokens)
        loss = actor.loss(tokens, tokens)
        cg.backward(loss)
        actor.update()
        return logits, loss

    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(31, (steps, 3, 7), generator=generator)
    compiled = step.lower(batches[0]).compile()
    for tokens in batches:
        found = compiled(tokens)
        logits, loss = plain.forward(tokens), plain.loss(tokens, tokens)
        loss.backward()
        plain.update()
        close(found, (logits.detach(), loss.detach()), "what the step returns")
        for rank, instance in actor.instances.items():
            assert (
                instance.found.keys() == plain.found.keys() == dict(plain.named_parameters()).keys()
            ), "each parameter has a gradient"
            mine = dict(instance.named_parameters())
            for name, parameter in plain.named_parameters():
                region = region_of(actor, name, rank)
                what = f"{name} on rank {rank}"
                gradient = cut_out(plain.found[name], region)
                close(instance.found[name], gradient, f"the gradient of {what}")
                close(mine[name].detach(), cut_out(parameter.detach(), region), what)


def close(found: Any, expected: Any, what: str) -> None:
    torch.testing.assert_close(
        found, expected, rtol=1e-5, atol=1e-7, msg=lambda text: f"{what}: {text}"
    )


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        pytest.param("llama", "sdpa", marks=SLOW),
        pytest.param("qwen2", "eager", marks=SLOW),
        ("qwen3", "sdpa"),
        ("gpt2", "sdpa"),
        pytest.param("llama", "eager", marks=SLOW),
        pytest.param("qwen2", "sdpa", marks=SLOW),
        pytest.param("qwen3", "eager", marks=SLOW),
        pytest.param("mistral", "eager", marks=SLOW),
        pytest.param("mistral", "sdpa", marks=SLOW),
        pytest.param("gpt2", "eager", marks=SLOW),
    ],
)
def test_a_model_trains_as_in_one_process(family: str, attention: str) -> None:
    plan = cg.plans.hf(model_of(family, attention)) | ROWS
    with use_world(VirtualWorld(4)):
        actor = LanguageModel.on(cg.mesh(dp=2, tp=2), plan=plan)(family, attention)  # type: ignore[attr-defined]
        train(actor, LanguageModel(family, attention))
        cut = [path for path, tensor in actor._group.logical.items() if tensor.layout is not None]
        assert len(cut) >= 7, "those of attention and MLP, and the head or the embedding"


def test_fewer_heads_of_keys_than_ranks() -> None:
    """Two axes in the place of tp; with one the error says so."""
    config = {"num_key_value_heads": 1}
    model = model_of("llama", "sdpa", **config)
    with use_world(VirtualWorld(4)):
        on = LanguageModel.on  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=r"make two axes of 'tp', such as cg.mesh\(kv=1, rep"):
            on(cg.mesh(tp=2), plan=cg.plans.hf(model))("llama", "sdpa", **config)
        plan = cg.plans.hf(model, axis=("kv", "rep")) | ROWS
        actor = on(cg.mesh(dp=2, kv=1, rep=2), plan=plan)("llama", "sdpa", **config)
        train(actor, LanguageModel("llama", "sdpa", **config), steps=1)
