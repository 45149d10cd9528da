"""Experts that stay quantized: their products, gradients, cuts and folders, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.quantized.readers import read_settings
from cg.launch.world.world import use_world
from cg.tracer.method.experts.expert_products import expert_linear
from cg.tracer.method.quantized import quantized_expert_products
from cg.tracer.method.quantized.quantized_expert_products import quantized_expert_linear

from .families import transformers
from .quantized_folders import FORMS, SIZE, write, write_mxfp4
from .test_experts import FAMILIES, correct_choices

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 2 * SIZE,
    "intermediate_size": 2 * SIZE,
    "moe_intermediate_size": 2 * SIZE,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": SIZE,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "first_k_dense_replace": 0,
    "kv_lora_rank": SIZE,
    "q_lora_rank": SIZE,
    "qk_rope_head_dim": SIZE,
    "qk_nope_head_dim": SIZE,
    "v_head_dim": SIZE,
}
SLOW = pytest.mark.slow
QUICK = (("float8 tensor", False), ("packed, uneven", True), ("gptq by activation", False))
"""Formats of products in a default run, and whether by the way of devices."""
IDS = torch.arange(1, 33).view(4, 8)


def model_of(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    heads = {"num_key_value_heads": 4} if family == "DeepseekV3" else {}
    sizes = FAMILIES[family] | SIZES | heads | changes
    names = getattr(transformers, f"{family}Config")
    model = getattr(transformers, f"{family}ForCausalLM")(names(**sizes)).eval()
    correct_choices(model)
    return model


def empty(family: str, **changes: Any) -> Any:
    with cg.empty_weights():
        return model_of(family, **changes)


@cg.actor
class Trained(nn.Module):
    """A model of which all that is not quantized is trained."""

    def __init__(self, cuts: Any) -> None:
        super().__init__()
        self.part = cuts.part(0)

    def loss(self, ids: Tensor) -> Tensor:
        logits = self.part(None, input_ids=ids, use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1), ids.flatten())

    def gradient(self) -> Tensor:
        gradient: Tensor = self.part.model.get_input_embeddings().weight.grad
        return gradient


def loss_and_gradient(model: Any) -> tuple[Tensor, Tensor]:
    """Those of the model in one process."""
    loss = cross_entropy(model(IDS, use_cache=False).logits.flatten(0, 1), IDS.flatten())
    loss.backward()
    return loss.detach(), model.get_input_embeddings().weight.grad


def step_of(family: str, folder: Path, ep: int, **changes: Any) -> tuple[Any, Any, frozenset[str]]:
    """A step over a folder, its actor, and the names of quantized tensors."""
    weights, model = cg.pretrained(folder), empty(family, **changes)
    names = cg.keep_quantized(model, weights)
    weights.check(model)
    cuts = cg.cut_layers(model, 1)
    if ep == 1:
        actor = Trained.on(0, init=weights)(cuts)
    else:
        plan = cg.plan({"loss(ids)": cg.cut(0, "ep")}) | cg.plans.hf(model, experts="ep")
        actor = Trained.on(cg.mesh(dp=1, ep=ep, tp=1), plan=plan, init=weights)(cuts)

    @cg.trace
    def step(ids: Tensor) -> Any:
        loss = actor.loss(ids)
        cg.backward(loss)
        return loss, actor.gradient()

    return step, actor, names


CASES = [
    ("Qwen3Moe", "fp8", 2),  # in a default run
    ("Qwen3Moe", "fp8", 1),
    ("Mixtral", "awq", 2),
    *(("Qwen3Moe", name, 2) for name in FORMS if name not in ("fp8", "int8")),
    *((family, "fp8", 2) for family in ("Mixtral", "DeepseekV3", "Glm4Moe")),
]


@pytest.mark.parametrize(
    ("family", "name", "ep"),
    [pytest.param(*case, marks=SLOW if i else ()) for i, case in enumerate(CASES)],
)
def test_losses_and_gradients_are_those_of_the_plain_weights(
    family: str, name: str, ep: int, tmp_path: Path
) -> None:
    """Also where ranks have some of the experts each, by either form of what travels.

    Of int8 more than half of all roundings are ties, so only its products are compared, below.
    """
    plain = model_of(family)
    write(plain, tmp_path, FORMS[name])
    right = loss_and_gradient(plain)
    for form in ("gather", "exchange")[:ep]:
        with use_world(VirtualWorld(ep)):
            step, actor, _ = step_of(family, tmp_path, ep)
            compiled = step.lower(IDS).compile(dispatch=form)
            for result, wanted in zip(compiled(IDS), right, strict=True):
                torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)
            for piece in (actor.instances if ep > 1 else {0: actor.local}).values():
                check_memory(piece, ep)


def check_memory(piece: Any, ep: int) -> None:
    """A rank has its own experts, in few bits."""
    own = [(p, t) for p, t in piece.named_parameters() if ".experts." in p]
    assert own
    assert all(tensor.shape[0] == 4 // ep for _, tensor in own)
    numbers = 3 * 4 // ep * SIZES["hidden_size"] * SIZES["moe_intermediate_size"]
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in own)
    assert size < 2 * numbers, "it is as small as in 16 bits"


""" + """


def test_a_folder_is_saved_as_it_was(tmp_path: Path) -> None:
    """Each expert has its tensors again, bit for bit."""
    folder = tmp_path / "from"
    write(model_of("Mixtral"), folder, FORMS["gptq"])
    with use_world(VirtualWorld(2)):
        _, actor, names = step_of("Mixtral", folder, 2)
        assert len(names) == 4 * 4 + 3 * 4
        cg.save_checkpoint(tmp_path / "to", [actor], like=folder)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "to"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype
        assert torch.equal(tensor.view(torch.uint8), after[key].view(torch.uint8)), key


@pytest.mark.parametrize(
    ("name", "is_device"),
    [
        pytest.param(name, is_device, marks=() if (name, is_device) in QUICK else SLOW)
        for name in FORMS
        for is_device in (False, True)
    ],
)
def test_products_are_those_of_the_plain_weights(
    name: str, is_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all formats, with the gradients of inputs; scales of inputs are each expert's own.

    Devices dequantize the matrices of all experts together.
    """
    if is_device:
        monkeypatch.setattr(quantized_expert_products, "one_at_a_time", lambda device: False)
    form, generator = FORMS[name], torch.Generator().manual_seed(0)
    layers = [
        [form.quantize(torch.randn(width, 2 * SIZE, generator=generator)) for _ in range(3)]
        for width in (2 * SIZE, SIZE)
    ]
    kind = read_settings(form.settings).choose("up", ("Linear",))
    assert kind is not None
    tensors = [
        torch.stack([expert.tensors[own] for expert in layer])
        for layer in layers
        for own in kind.names
    ]
    weight = torch.cat([torch.stack([expert.weight for expert in layer]) for layer in layers], 1)
    ids = torch.tensor([[0, 2], [2, 0], [0, 0], [2, 2], [0, 2]])  # none is of the second expert
    for shape in ((5, 2 * SIZE), (5, 2, 2 * SIZE)):
        x, plain = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(2))
        x.data.copy_(plain.data)
        rounded = plain if form.rounded is None else plain + (form.rounded(plain) - plain).detach()
        right = expert_linear(rounded, weight, ids)
        product = quantized_expert_linear(x, tensors, ids, kind, (2 * SIZE, SIZE), 2 * SIZE)
        gradient = torch.randn(right.shape, generator=generator)
        right.backward(gradient)
        product.backward(gradient)
        torch.testing.assert_close(product, right, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(x.grad, plain.grad, rtol=1e-5, atol=1e-4)


def check_refused(folder: Path, reason: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(str(folder))}.*{reason}"):
        cg.keep_quantized(empty("Qwen3Moe"), cg.pretrained(folder))


def test_experts_that_are_not_read_are_refused(tmp_path: Path) -> None:
    """Those of a model without such experts, of several formats, and with tensors that lack."""
    write(model_of("Qwen3Moe"), tmp_path, FORMS["awq"])
    own = load_file(tmp_path / "model.safetensors")
    expert = "model.layers.0.mlp.experts.1.up_proj"
    others = {key: tensor for key, tensor in own.items() if ".experts.1." not in key}
    for tensors, reason in (
        (
            own
            | {"model.layers.7.mlp.experts.0.up_proj.qweight": own[f"{expert}.qweight"].clone()},
            "experts of awq are not read so",
        ),
        (others, "stacked in a way that is not read: all of the 4 experts have one format"),
        (
            {
                key: tensor
                for key, tensor in own.items()
                if ".experts." not in key or "qzeros" not in key
            },
            "lacks 'model.layers.0.mlp.experts.gate_up_proj.gate_proj.qzeros', which awq",
        ),
    ):
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        check_refused(tmp_path, reason)
    save_file(own, tmp_path / "model.safetensors", {"format": "pt"})
    with cg.empty_weights():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1))
    with pytest.raises(ValueError, match="LlamaForCausalLM has no stacked weights that they are"):
        cg.keep_quantized(model, cg.pretrained(tmp_path))


def test_an_implementation_that_needs_plain_weights_is_refused(tmp_path: Path) -> None:
    write(model_of("Qwen3Moe"), tmp_path, FORMS["fp8"])
    model = empty("Qwen3Moe")
    cg.keep_quantized(model, cg.pretrained(tmp_path))
    with pytest.raises(ValueError, match=r"are quantized .fp8 in blocks.*leave out experts="):
        cg.cut_layers(model, 1, experts="batched_mm")


def test_experts_of_mxfp4(tmp_path: Path) -> None:
    """Folders have them stacked, in four dimensions, with biases beside them."""
    plain = model_of("GptOss", intermediate_size=64)
    for name, parameter in plain.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, 0.0, 0.2)
    write_mxfp4(plain, tmp_path / "from")
    before = load_file(tmp_path / "from" / "model.safetensors")
    right = loss_and_gradient(plain)
    with use_world(VirtualWorld(2)):
        step, actor, names = step_of("GptOss", tmp_path / "from", 2, intermediate_size=64)
        assert len(names) == 4
        for result, wanted in zip(step.lower(IDS).compile()(IDS), right, strict=True):
            torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)
        cg.save_checkpoint(tmp_path / "to", [actor], like=tmp_path / "from")
    after = load_file(tmp_path / "to" / "model.safetensors")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
