"""Folders of bitsandbytes: their numbers, cuts and bytes, and what is refused.

The library itself was compared once: see the guide.
"""

from __future__ import annotations

import json
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
from cg.launch.world.world import use_world

from .families import model_of
from .quantized_folders import BYTES, SIZE, write

SIZES = {"hidden_size": 64, "intermediate_size": 128}
NAMES = [
    pytest.param(name, marks=() if name == "nf4, nested" else pytest.mark.slow) for name in BYTES
]
IDS = torch.arange(1, 33).view(4, 8) % 8 + 1


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
        gradient: Tensor = self.part.model.model.norm.weight.grad
        return gradient


def placed(folder: Path, tp: int) -> Any:
    """An actor with the weights of a folder."""
    with cg.empty_weights():
        model = model_of("Llama", 1, **SIZES)
    weights = cg.pretrained(folder)
    names = cg.keep_quantized(model, weights)
    weights.check(model)
    assert len({name.rpartition(".")[0] for name in names}) == 7
    small = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if n in names)
    plain = sum(
        p.numel() for n, p in model_of("Llama", 1, **SIZES).named_parameters() if "proj" in n
    )
    assert small < 2 * plain, "it is as small as in 16 bits"
    cuts = cg.cut_layers(model, 1)
    if tp == 1:
        return Trained.on(0, init=weights)(cuts)
    plan = cg.plans.hf(model, batch=None)
    return Trained.on(cg.mesh(tp=tp), plan=plan, init=weights)(cuts)


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_are_those_of_the_plain_weights(name: str, tmp_path: Path) -> None:
    """Also where ranks have pieces; scales that are shared by rows of several are whole there."""
    plain: Any = model_of("Llama", 1, **SIZES).float()
    write(plain, tmp_path, BYTES[name])
    loss = cross_entropy(plain(IDS, use_cache=False).logits.flatten(0, 1), IDS.flatten())
    loss.backward()
    wanted = loss.detach(), plain.model.norm.weight.grad
    for tp in (1, 2):
        with use_world(VirtualWorld(tp)):
            actor = placed(tmp_path, tp)

            @cg.trace
            def step(ids: Tensor, actor: Any = actor) -> Any:
                loss = actor.loss(ids)
                cg.backward(loss)
                return loss, actor.gradient()

            lowered = step.lower(IDS)
            transfers = [line for line in lowered.as_text().splitlines() if " transfer(" in line]
            of_tokens = r": f32\[(4,8,64|32,64|32,1|32|192|)\]$"  # and norms' gradients
            assert all(re.search(of_tokens, line) for line in transfers)
            for result, right in zip(lowered.compile()(IDS), wanted, strict=True):
                torch.testing.assert_close(result, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_saved_as_it_was(name: str, tmp_path: Path) -> None:
    """Every tensor has the name, the shape and the bytes of its folder again."""
    write(model_of("Llama", 1, **SIZES).float(), tmp_path / "from", BYTES[name])
    with use_world(VirtualWorld(2)):
        actor = placed(tmp_path / "from", 2)
        cg.save_checkpoint(tmp_path / "to", [actor], like=tmp_path / "from")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("from", "to"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert (tensor.dtype, tensor.shape) == (after[key].dtype, after[key].shape), key
        assert torch.equal(
            tensor.flatten().view(torch.uint8), after[key].flatten().view(torch.uint8)
        )


def test_scales_that_go_on_from_row_to_row_are_refused(tmp_path: Path) -> None:
    write(model_of("Llama", 1, **SIZES | {"intermediate_size": 24}).float(), tmp_path, BYTES["nf4"])
    with cg.empty_weights():
        model = model_of("Llama", 1, **SIZES | {"intermediate_size": 24})
    with pytest.raises(ValueError, match=f"has 24 inputs, and scales of {SIZE} numbers, which go"):
        cg.keep_quantized(model, cg.pretrained(tmp_path))


def test_other_settings_are_refused(tmp_path: Path) -> None:
    write(model_of("Llama", 1, **SIZES).float(), tmp_path, BYTES["nf4"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["bnb_4bit_quant_storage"] = "float32"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="bnb_4bit_quant_storage 'float32', and what is read is"):
        cg.quantization(tmp_path)


def test_a_layer_without_its_description_is_refused(tmp_path: Path) -> None:
    write(model_of("Llama", 1, **SIZES).float(), tmp_path, BYTES["nf4"])
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with cg.empty_weights():
        model = model_of("Llama", 1, **SIZES)
    with pytest.raises(ValueError, match=r"up_proj.weight_quant_state_bitsandbytes__nf4', which"):
        cg.keep_quantized(model, cg.pretrained(tmp_path))


@pytest.mark.parametrize(
    ("name", "tensor", "text", "reason"),
    [
        ("LLM.int8", "weight_format", b"\x02", r"in the order of a kernel .*weight_format 2\)"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", b'{"quant_type": "fp4"}', "it is of fp4"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", b"{", "is not one of bitsandbytes, nf4"),
    ],
)
def test_other_descriptions_are_refused(
    name: str, tensor: str, text: bytes, reason: str, tmp_path: Path
) -> None:
    write(model_of("Llama", 1, **SIZES).float(), tmp_path, BYTES[name])
    tensors = load_file(tmp_path / "model.safetensors")
    key = f"model.layers.0.mlp.up_proj.{tensor}"
    shape = tensors[key].shape if name == "LLM.int8" else (len(text),)
    tensors[key] = torch.tensor(list(text), dtype=torch.uint8).view(shape)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with cg.empty_weights():
        model = model_of("Llama", 1, **SIZES)
    with pytest.raises(ValueError, match=reason):
        cg.keep_quantized(model, cg.pretrained(tmp_path))
