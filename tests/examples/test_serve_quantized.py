"""Quantized folders are served as they are: the tokens of the model that computes with the same."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from cg.backends.virtual.world import VirtualWorld
from cg.launch.quantized import few_rows
from cg.launch.world.world import use_world
from examples.serve import start_check
from examples.serve.engine import start
from examples.serve.lora import read_adapter
from examples.serve.opening import open_model
from examples.serve.parts import Ways
from examples.serve.products import JoinedQuantized
from examples.serve.requests import Request, Sampling
from examples.serve.scheduler import Scheduler
from examples.serve.settings import Options

from ..models.quantized_folders import BYTES, FORMS, SIZE, Form, write, write_mxfp4
from ..models.test_quantized_experts import model_of as mixture_of
from .serve_driver import Driver, Habits, differences, random_requests
from .serve_models import FEW, logits_of, serving

SLOW = pytest.mark.slow
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LEAN = replace(FEW, groups=1, batches=(2,), chunks=(16,), prompt_tokens=32, warm=False, draws=False)


def save(folder: Path, form: Form, **changes: Any) -> Any:
    """Write a quantized Llama; gives a model that computes what the folder stands for."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE | changes)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, 0.0, 0.2)
    write(model, folder, form)
    return model


def serve(source: Path, ranks: int, options: Options) -> list[Any]:
    with use_world(VirtualWorld(ranks)):
        engine = start(source, options)
        assert engine is not None
        requests = [
            replace(each, sampling=Sampling()) for each in random_requests(4, 3, engine.limits)
        ]
        Driver(engine, Habits(seed=3, chunk=16, companions=2)).run(requests)
        engine.close()
    return requests


@pytest.mark.parametrize(
    ("name", "ranks", "tp"),
    [
        ("fp8", 1, 1),
        *(pytest.param(name, 1, 1, marks=SLOW) for name in FORMS if name != "fp8"),
        *(pytest.param(name, 2, 2, marks=SLOW) for name in FORMS),
        pytest.param("fp8", 2, 1, marks=SLOW),
    ],
)
def test_tokens_are_those_of_the_model(name: str, ranks: int, tp: int, tmp_path: Path) -> None:
    model = save(tmp_path, FORMS[name], num_hidden_layers=ranks // tp)
    requests = serve(tmp_path, ranks, replace(LEAN, tp=tp))
    assert differences(logits_of(model), requests)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("fp8", 1), ("awq", 1), ("awq", 2), ("gptq", 2)])
def test_tokens_by_products_of_few_rows(
    name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of two, and chunks of 16 tokens, by the operator that is a kernel on devices."""
    monkeypatch.setattr(few_rows, "has_kernel", lambda *types: True)
    model = save(tmp_path, FORMS[name], num_hidden_layers=1)
    requests = serve(tmp_path, ranks, replace(LEAN, tp=ranks))
    assert differences(logits_of(model), requests)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", BYTES)
def test_tokens_of_bitsandbytes(name: str, tmp_path: Path) -> None:
    model = save(tmp_path, BYTES[name], num_hidden_layers=1)
    requests = serve(tmp_path, 2, replace(LEAN, tp=2))
    assert differences(logits_of(model), requests)[0] == 0


MIXTURES = [
    pytest.param("Qwen3Moe", "fp8", 1, 1),
    *(
        pytest.param(*case, marks=SLOW)
        for case in (("Mixtral", "packed", 2, 1), ("Qwen3Moe", "gptq", 2, 2), ("GptOss", "", 2, 1))
    ),
]


@pytest.mark.parametrize(("family", "name", "ep", "tp"), MIXTURES)
def test_tokens_of_experts(family: str, name: str, ep: int, tp: int, tmp_path: Path) -> None:
    """A rank has some of the experts, in few bits; sizes are chosen by their bytes."""
    ids = {"eos_token_id": None, "bos_token_id": None, "max_position_embeddings": 64}
    model = mixture_of(family, **ids, initializer_range=0.2)
    if family == "GptOss":
        write_mxfp4(model, tmp_path)
    else:
        write(model, tmp_path, FORMS[name])
    experts = open_model(tmp_path).experts
    assert experts is not None
    assert experts.numbers > experts.bytes(torch.float16) / 2
    requests = serve(tmp_path, ep * tp, replace(LEAN, ep=ep, tp=tp))
    assert differences(logits_of(model), requests)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_layers_of_one_input_are_joined_over_ranks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys and values are one product, and so are gate and up, if nothing forbids it."""
    joined: list[int] = []
    built = JoinedQuantized.__init__

    def counted(self: JoinedQuantized, layer: Any, layers: Any, ways: int) -> None:
        joined.append(ways * len(layers))
        built(self, layer, layers, ways)

    monkeypatch.setattr(JoinedQuantized, "__init__", counted)
    model = save(tmp_path, FORMS[name], num_hidden_layers=1, hidden_size=64)
    requests = serve(tmp_path, 2, replace(LEAN, tp=2))
    assert differences(logits_of(model), requests)[0] == 0
    assert sorted(set(joined)) == ([] if name == "float8 tensor" else [2 * 2, 2 * 3])


def adapt(folder: Path, model: Any, paths: tuple[str, ...]) -> None:
    """Write an adapter, and add it to what the layers of a model compute."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for path in paths:
        layer = model.get_submodule(path)
        a = torch.randn(2, layer.in_features, generator=generator) * 0.3
        b = torch.randn(layer.out_features, 2, generator=generator) * 0.3
        name = f"base_model.model.{path}"
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        plain = layer.forward
        layer.forward = partial(added, plain, a, b)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def added(plain: Any, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    output: Tensor = plain(x)
    return output + 2 * (x @ a.t()) @ b.t()


def test_adapters_are_added_to_quantized_layers(tmp_path: Path) -> None:
    """Where ranks cut both; a layer whose tensors are packed has no weight of that name."""
    folder, adapter = tmp_path / "model", tmp_path / "adapter"
    adapter.mkdir()
    model = save(folder, FORMS["gptq"], num_hidden_layers=1)
    layers = "model.layers.0"
    adapt(adapter, model, (f"{layers}.self_attn.o_proj", f"{layers}.mlp.up_proj"))
    opened = open_model(folder, adapters=[read_adapter(adapter)])
    requests = [Request(number, (5, 9, 11 + number), 6, adapter=1) for number in range(2)]
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    with serving(opened, 2, replace(LEAN, tp=2)) as engine:
        scheduler = Scheduler(engine.limits)
        for request in requests:
            scheduler.add(request)
        while not scheduler.is_idle:
            for ticket in list(scheduler.schedule()):
                result = engine.submit(ticket.work)
                scheduler.complete(ticket, result.result(60), counts=result.counts())
            pairs = scheduler.take_events().pairs
            for number, token in zip(pairs[::2], pairs[1::2], strict=True):
                tokens[number].append(token)
    for request in requests:
        ids = torch.tensor([[*request.prompt, *tokens[request.id]]])
        with torch.no_grad():
            logits = model(ids).logits[0]
        assert tokens[request.id] == logits[len(request.prompt) - 1 : -1].argmax(-1).tolist()


def test_sizes_are_chosen_by_the_bytes_of_quantized_weights(tmp_path: Path) -> None:
    save(tmp_path, FORMS["fp8"], num_hidden_layers=1)
    model = open_model(tmp_path)
    assert model.quantized is not None
    numbers = 2 * 64 * 32 + 2 * 32 * 32 + 3 * 32 * 64
    assert model.quantized.numbers == numbers
    assert model.quantized.bytes == numbers + 4 * numbers // SIZE**2
    biases_and_norms = 64 + 32 + 32 + 32 + 2 * 32
    assert model.layer_bytes(torch.bfloat16) == 2 * biases_and_norms + model.quantized.bytes


def test_a_part_is_compared_without_the_rounding_of_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are rounded to either side of a tie, and deep models differ by a tenth."""
    monkeypatch.setattr(start_check, "COARSE", 0.01)
    save(tmp_path, FORMS["fp8"])
    part: Any = open_model(tmp_path).build(range(2), torch.float16, Ways())
    layers = [module for module in part.modules() if hasattr(module, "rounds_inputs")]
    assert len(layers) == 2 * 4
    assert all(layer.rounds_inputs for layer in layers)
