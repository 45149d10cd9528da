"""Adapters of stacked weights are computed as peft computes them, and what peft switches, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import cg

from .decoders import VOCABULARY
from .test_experts import model_of

peft = pytest.importorskip("peft", reason="adapters need peft: pip install peft")

IDS = torch.arange(3, 3 + 12).view(2, 6) % VOCABULARY


def adapted_model(family: str) -> Any:
    """A mixture in float64 with adapters `default` and `other` that change what it computes."""
    settings = peft.LoraConfig(
        r=3,
        target_modules="all-linear",
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model_of(family), settings)
    model.add_adapter("other", settings)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    return model.double()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=IDS, use_cache=False).logits.square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def close(own: Any, expected: Any) -> None:
    torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", ["GptOss", pytest.param("Mixtral", marks=pytest.mark.slow)])
def test_products_of_factors_are_what_peft_computes(family: str) -> None:
    """GPT-OSS has turned matrices, and biases; Mixtral's router is adapted as well."""
    model = adapted_model(family)
    model.base_model.model.set_experts_implementation("eager")
    choices: list[Any] = ["default", "other", ["default", "other"]]
    expected = []
    for names in choices:
        model.base_model.set_adapter(names)
        expected.append((model(input_ids=IDS).logits, gradients(model)))
    with model.disable_adapter():
        plain = model(input_ids=IDS).logits
    assert not torch.allclose(expected[0][0], plain)
    cg.cut_layers(model, 1)
    for names, (logits, grads) in zip(choices, expected, strict=True):
        model.base_model.set_adapter(names)
        close(model(input_ids=IDS).logits, logits)
        close(gradients(model), grads)
    with model.disable_adapter():
        close(model(input_ids=IDS).logits, plain)
    model.merge_adapter(["default"])
    model.base_model.set_adapter("default")
    close(model(input_ids=IDS).logits, expected[0][0])


def test_weights_of_experts_are_not_added_up() -> None:
    """Nothing as large as a weight of all experts is computed from the adapters."""
    model = adapted_model("Mixtral")
    model.base_model.set_adapter("default")
    cg.cut_layers(model, 1)
    sizes = {p.shape for n, p in model.named_parameters() if n.endswith("_proj")}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        saved: list[torch.Tensor] = []
        model(input_ids=IDS, use_cache=False)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    extra = [t.shape for t in saved if t.untyped_storage().data_ptr() not in own]
    assert not sizes.intersection(extra)
    assert not sizes.intersection(shape[:1] + shape[:0:-1] for shape in extra)
