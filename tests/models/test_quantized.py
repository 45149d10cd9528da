"""Layers that stay quantized: their numbers, gradients, cuts, folders, and what is refused."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.conversions.conversion import StoredType
from cg.launch.quantized import few_rows
from cg.launch.quantized.quantized_linear import QuantizedLinear
from cg.launch.quantized.readers import read_settings
from cg.launch.world.world import use_world
from cg.tracer.method.quantized.dequantize import dequantized, rounded, unpacked
from cg.tracer.method.quantized.quantized_product import quantized_product
from cg.tracer.method.quantized.weight_format import Packing, WeightFormat

from .families import model_of
from .quantized_folders import BYTES, FORMS, SIZE, Form, float8_blocks, gptq, packed, write

WIDE, HIDDEN = 4 * SIZE, 2 * SIZE


def layer_of(form: Form, plain: nn.Linear) -> tuple[QuantizedLinear, Tensor]:
    """A layer with quantized tensors in memory, and the weight that they stand for."""
    made = form.quantize(plain.weight.detach())
    weight_format = read_settings(form.settings).choose("up", ("Linear",))
    assert weight_format is not None
    types = {
        name: StoredType(tuple(made.tensors[name].shape), made.tensors[name].dtype)
        for name in weight_format.names
    }
    layer = QuantizedLinear(plain, weight_format, types)
    for name in types:
        layer.register_parameter(name, nn.Parameter(made.tensors[name], requires_grad=False))
    return layer, made.weight


@cg.actor
class Block(nn.Module):
    """Two layers, whose weights a plan may cut, and one in front of them that is trained."""

    def __init__(self, form: Form | None, of: Form) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.scale = nn.Parameter(torch.rand(HIDDEN, generator=generator) + 0.5)
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN, bias=False)
        for parameter in (self.up.weight, self.up.bias, self.down.weight):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.requires_grad_(False)
        for name, plain in (("up", self.up), ("down", self.down)):
            layer, weight = layer_of(of, plain)
            if form is not None:
                setattr(self, name, layer)
            else:
                plain.weight.data = weight
        self.rounded = of.rounded if form is None else None

    def loss(self, x: Tensor) -> Tensor:
        return self.output(x).square().mean()

    def output(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(self.up(self._input(x * self.scale)))
        return self.down(self._input(hidden))

    def _input(self, x: Tensor) -> Tensor:
        if self.rounded is None:
            return x
        return x + (self.rounded(x) - x).detach()

    def gradient(self) -> Tensor:
        assert self.scale.grad is not None
        return self.scale.grad


def run(form: Form, tp: int) -> Any:
    """The output and the gradient of a step on `tp` ranks."""
    with use_world(VirtualWorld(tp)):
        step, x = step_of(form, tp)
        return step(x)


def step_of(form: Form, tp: int) -> tuple[Any, Tensor]:
    """A step of a block on `tp` ranks, and its argument."""
    if tp == 1:
        block = Block.on(0)(form, form)
    else:
        shardings: dict[str, Any] = {}
        for name, cut in (("up", cg.cut(0, "tp")), ("down", cg.cut(1, "tp"))):
            plain = nn.Linear(*((HIDDEN, WIDE) if name == "up" else (WIDE, HIDDEN)))
            layer, _ = layer_of(form, plain)
            own = {**layer.shardings(cut), **({"bias": cut} if name == "up" else {})}
            shardings |= {f"{name}.{key}": sharding for key, sharding in own.items()}
        shardings = {key: sharding for key, sharding in shardings.items() if sharding.cuts}
        block = Block.on(cg.mesh(tp=tp), plan=cg.plan(shardings))(form, form)

    @cg.trace
    def step(x: Tensor) -> Any:
        loss = block.loss(x)
        cg.backward(loss)
        return block.output(x), block.gradient()

    return step, torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("fp8", "awq") else pytest.mark.slow)
        for name in FORMS
    ],
)
def test_products_of_few_rows_are_those_of_the_plain_weight(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the operator that is a kernel on devices, whole and cut; of its pieces nothing travels."""
    traced: list[torch.Size] = []

    def noted(x: Tensor, *tensors: Tensor | None, **options: Any) -> Tensor:
        traced.append(x.shape)
        return quantized_product(x, *tensors, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(few_rows, "has_kernel", lambda *types: True)
    monkeypatch.setattr(few_rows, "summands_of", lambda *sizes: 3)
    monkeypatch.setattr(few_rows, "quantized_product", noted)
    form = FORMS[name]
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    with use_world(VirtualWorld(1)):
        plain = Block.on(0)(None, form).local
        plain.loss(x).backward()
        wanted = plain.output(x).detach(), plain.gradient()
    for tp in (1, 2):
        with use_world(VirtualWorld(tp)):
            step, x = step_of(form, tp)
            lowered = step.lower(x)
            for result, right in zip(lowered.compile()(x), wanted, strict=True):
                torch.testing.assert_close(result, right, rtol=1e-5, atol=1e-5)
            lines = lowered.as_text().splitlines()
            assert bool(traced) is (name != "gptq by activation")
            transfers = [line for line in lines if " transfer(" in line and "%sum" not in line]
            # Products of five rows, of runs of outputs, and scales of inputs: nothing of weights.
            shapes = [re.search(r": f32\[(5,[0-9,]+)\]$", line) for line in transfers]
            assert all(shape is not None for shape in shapes)
            numbers = [math.prod(map(int, shape[1].split(","))) for shape in shapes if shape]
            assert set(numbers) <= {5, 5 * 32}


FEW = ("fp8", "float8 channels", "packed, uneven", "gptq by activation", "awq")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in FORMS]
)
def test_outputs_and_gradients_are_those_of_the_plain_weight(name: str) -> None:
    """Also where ranks have pieces of the words and scales; scales of inputs are of all of them."""
    form = FORMS[name]
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    with use_world(VirtualWorld(1)):
        plain = Block.on(0)(None, form).local
        plain.loss(x).backward()
        wanted = plain.output(x).detach(), plain.gradient()
    for tp in (1, 2):
        for found, right in zip(run(form, tp), wanted, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def test_neither_travel_nor_are_kept_numbers_of_the_weights() -> None:
    """Of an input's scale over ranks a few numbers do; the backward dequantizes again."""
    for name in ("float8 channels", "gptq by activation"):
        with use_world(VirtualWorld(2)):
            step, x = step_of(FORMS[name], 2)
            lines = step.lower(x).as_text().splitlines()
        transfers = [line for line in lines if " transfer(" in line and "%sum" not in line]
        assert transfers
        assert all(re.search(r": f32\[(5,32|5,1,1)\]$", line) for line in transfers)
        (forward,) = (line for line in lines if ".vjp.forward(f32" in line)
        assert forward.split(" -> ")[1].startswith("(f32[], f32[5,32], f32[5,64/tp], f32[5,32])")


@pytest.mark.parametrize("name", FORMS)
def test_joined_layers_have_the_outputs_of_each(name: str) -> None:
    """Also where all outputs share a scale of inputs; a scale of the weight cannot be of both."""
    generator = torch.Generator().manual_seed(0)
    plain = [nn.Linear(HIDDEN, width) for width in (WIDE, HIDDEN)]
    for each in plain:
        each.weight.data = torch.randn(each.weight.shape, generator=generator)
    first, second = (layer_of(FORMS[name], each)[0] for each in plain)
    layer = first.joined([second])
    if name == "float8 tensor":
        assert layer is None
        return
    assert layer is not None
    x = torch.randn(5, HIDDEN, generator=generator)
    right = torch.cat([first(x), second(x)], -1)
    torch.testing.assert_close(layer(x), right, rtol=1e-5, atol=1e-5)
    halves = first.joined([second], ways=2)  # one piece of each layer, and then the others
    assert halves is not None
    pieces = [each(x).unflatten(-1, (2, -1)) for each in (first, second)]
    right = torch.cat(pieces, -1).flatten(-2)
    torch.testing.assert_close(halves(x), right, rtol=1e-5, atol=1e-5)
    assert first.joined([second], ways=2 * HIDDEN) is None
    if name == "awq":
        second.qzeros.data = second.qzeros.data[:, :-1]
        second.out_features -= 4
        assert first.joined([second]) is None


def test_layers_of_one_run_that_shares_a_scale_are_not_joined() -> None:
    """Even if scales are equal: a kernel takes one for each run of outputs."""
    plain = nn.Linear(2 * SIZE, SIZE)
    first, second = (layer_of(FORMS["fp8"], plain)[0] for _ in range(2))
    assert first.joined([second]) is None


def folder_of(tmp_path: Path, name: str, **changes: Any) -> Path:
    """A folder of a tiny Llama, with other settings if there are any."""
    write(model_of("Llama", 1), tmp_path, replace(FORMS[name]))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def empty() -> Any:
    with cg.empty_weights():
        return model_of("Llama", 1)


@cg.actor
class Trained(nn.Module):
    """A model whose norms are trained."""

    def __init__(self, cuts: Any) -> None:
        super().__init__()
        self.part = cuts.part(0)

    def logits(self, ids: Tensor) -> Tensor:
        return self.part(None, input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("name", ["fp8", "gptq"])
def test_a_folder_is_saved_as_it_was(name: str, tmp_path: Path) -> None:
    """Every tensor has the bytes and the type of its folder, whatever ranks hold."""
    folder = folder_of(tmp_path / "from", name)
    weights = cg.pretrained(folder)
    model = empty()
    names = cg.keep_quantized(model, weights)
    assert len({name.rpartition(".")[0] for name in names}) == 7
    weights.check(model)
    with use_world(VirtualWorld(1)):
        actor = Trained.on(0, init=weights)(cg.cut_layers(model, 1))
        cg.save_checkpoint(tmp_path / "to", [actor], like=folder)
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "to"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype
        assert torch.equal(tensor.view(torch.uint8), after[key].view(torch.uint8)), key
    settings = json.loads((tmp_path / "to" / "config.json").read_text())["quantization_config"]
    assert settings == FORMS[name].settings


def test_layers_that_are_plain_in_the_folder_stay_plain(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "fp8")
    tensors = load_file(folder / "model.safetensors")
    path = "model.layers.0.mlp.up_proj"
    del tensors[f"{path}.weight_scale_inv"]
    tensors[f"{path}.weight"] = tensors[f"{path}.weight"].float()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model, weights = empty(), cg.pretrained(folder)
    names = cg.keep_quantized(model, weights)
    weights.check(model)
    assert not any(name.startswith(path) for name in names)
    assert len(names) == 12
    assert "model.layers.0.mlp.down_proj.weight_scale_inv" in names


def test_plans_cut_between_scales_and_words_alone(tmp_path: Path) -> None:
    """An axis for which there are no whole runs is refused, where the actor is placed."""
    for name, run in (("fp8", "3 runs of 16 outputs"), ("awq", "1 runs of 8 outputs")):
        sizes = {"intermediate_size": 48} if name == "fp8" else {}
        write(model_of("Llama", 1, **sizes), tmp_path / name, FORMS[name])
        with cg.empty_weights():
            model = model_of("Llama", 1, **sizes)
        weights = cg.pretrained(tmp_path / name)
        cg.keep_quantized(model, weights)
        plan = cg.plans.hf(model, batch=None)
        mlp = "part.model.layers.0.mlp"
        if name == "fp8":
            assert plan.of_tensor(f"{mlp}.down_proj.weight_scale_inv").cuts[0][0] == 1
        else:
            assert plan.of_tensor(f"{mlp}.down_proj.qweight").cuts[0][0] == 0
            assert plan.of_tensor(f"{mlp}.up_proj.qzeros").cuts[0][0] == 1
        assert plan.of_tensor(f"{mlp}.up_proj.weight").cuts[0][0] == 0
        with use_world(VirtualWorld(2)), pytest.raises(ValueError, match=run):
            Trained.on(cg.mesh(tp=2), plan=plan, init=weights)(cg.cut_layers(model, 1))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("fp8", {"weight_block_size": None}, "fp8 has weight_block_size None, and what is read"),
        ("fp8", {"fmt": "e5m2"}, "fp8 has fmt 'e5m2', and what is read is e4m3"),
        ("packed", {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized', and what"),
        ("packed", {"kv_cache_scheme": {"num_bits": 8}}, "has kv_cache_scheme"),
        ("packed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
        ("gptq", {"bits": 3}, "gptq has bits 3, and what is read is 2, 4 or 8"),
        ("gptq", {"dynamic": {"-:.*": {}}}, "gptq has dynamic"),
        ("awq", {"version": "gemv"}, "awq has version 'gemv', and what is read is gemm"),
        ("awq", {"format": "gemv_fast"}, "awq has format 'gemv_fast', and what is read is gemm"),
        ("gptq", {"format": "marlin"}, "gptq has format 'marlin', and what is read is gptq or"),
        ("awq", {"quant_method": "torchao"}, "the format 'torchao' is not read; there are fp8, c"),
    ],
)
def test_other_formats_are_refused_by_name(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, name, **changes)
    for refuses in (lambda: cg.quantization(folder), lambda: keep(folder)):
        with pytest.raises(ValueError, match=f"the weights in {folder} are quantized: .*{reason}"):
            refuses()


def keep(folder: Path) -> None:
    cg.keep_quantized(empty(), cg.pretrained(folder))


def test_groups_in_another_order_than_the_configuration_says_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "gptq by activation", desc_act=False)
    with pytest.raises(ValueError, match=r"g_idx' in .* no neighbours.*set desc_act to true"):
        keep(folder)


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = "model.layers.0.mlp.up_proj"
    for number, (name, tensor, value, reason) in enumerate(
        (
            ("fp8", "weight_scale_inv", torch.ones(3, 1), r"is \[3, 1\] in .*, and fp8 in blocks"),
            ("gptq", "qzeros", None, "lacks 'model.layers.0.mlp.up_proj.qzeros', which gptq, 4"),
            (
                "gptq",
                "qweight",
                torch.float32,
                "is torch.float32 in .*, which gptq, 4 bits has not",
            ),
        )
    ):
        folder = folder_of(tmp_path / str(number), name)
        tensors = load_file(folder / "model.safetensors")
        key = f"{path}.{tensor}"
        if value is None:
            del tensors[key]
        else:
            tensors[key] = tensors[key].to(value) if isinstance(value, torch.dtype) else value
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=reason):
            keep(folder)


def test_ragged_sizes_and_scales_of_powers_of_two() -> None:
    """Blocks that are not full at the ends; and inputs whose scales are rounded up."""
    weight = torch.randn(21, 37, generator=torch.Generator().manual_seed(0))
    made = float8_blocks(weight)
    settings = {**FORMS["fp8"].settings, "scale_fmt": "ue8m0"}
    weight_format = read_settings(settings).choose("any", ())
    assert weight_format is not None
    assert weight_format.activations is not None
    numbers = dequantized(weight_format, made.tensors, 21, 37)
    assert torch.equal(numbers, made.weight)
    x = torch.cat([torch.zeros(1, 37), torch.randn(2, 37) * 1000])
    found = rounded(weight_format.activations, x, None)
    padded = nn.functional.pad(x, (0, 11)).unflatten(-1, (-1, SIZE))
    scale = 2 ** (padded.abs().amax(-1, keepdim=True) / 448).clamp(min=2**-100).log2().ceil()
    right = ((padded / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)[:, :37]
    torch.testing.assert_close(found, right, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["checkpoint_format", "format"])
def test_zero_points_of_both_layouts_of_gptq(name: str) -> None:
    """The second one stores them as they are."""
    made = gptq(torch.randn(16, 32, generator=torch.Generator().manual_seed(0)))
    zeros = made.tensors["qzeros"] + 0x11111111  # none of them is 15
    settings = {**FORMS["gptq"].settings, name: "gptq_v2"}
    weight_format = read_settings(settings).choose("any", ())
    assert weight_format is not None
    numbers = dequantized(weight_format, made.tensors | {"qzeros": zeros}, 16, 32)
    assert torch.equal(numbers, made.weight)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dimension", [0, 1])
def test_integers_are_unpacked(bits: int, dimension: int) -> None:
    """Along either dimension, also where the last word is not full."""
    generator = torch.Generator().manual_seed(bits)
    integers = torch.randint(1 << bits, (5, 21), generator=generator)
    words = packed(integers, bits)
    packing = Packing.in_order(bits, dimension)
    found = unpacked(packing, words if dimension else words.t(), 21)
    assert torch.equal(found if dimension else found.t(), integers.int())


def test_inputs_are_cast_by_autocast_as_those_of_plain_layers() -> None:
    plain = nn.Linear(HIDDEN, WIDE).requires_grad_(False)
    layer, plain.weight.data = layer_of(FORMS["gptq"], plain)
    found, right = (torch.randn(3, HIDDEN).requires_grad_() for _ in range(2))
    right.data.copy_(found.data)
    for module, x in ((layer, found), (plain, right)):
        with torch.autocast("cpu", torch.bfloat16):
            output = module(x)
        assert output.dtype is torch.bfloat16
        output.float().square().mean().backward()
    torch.testing.assert_close(found.grad, right.grad, rtol=2e-2, atol=1e-4)


def test_a_format_is_the_same_after_it_was_text() -> None:
    """Operators of torch take it so."""
    for form in (*FORMS.values(), *BYTES.values()):
        own = read_settings(form.settings).choose("up", ("Linear",))
        assert own is not None
        assert WeightFormat.from_text(own.as_text) == own
