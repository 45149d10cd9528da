"""Adapters of a served model: each request has the tokens of the model with its own one merged."""

from __future__ import annotations

import argparse
import json
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPT2Config

from examples.serve.engine import limits_of
from examples.serve.gpt import GptConfig
from examples.serve.lora import Adapter, Factors, must_run, read_adapter
from examples.serve.opening import open_model
from examples.serve.options import adapters as adapters_of
from examples.serve.options import add_arguments
from examples.serve.requests import Request
from examples.serve.scheduler import Scheduler

from .serve_models import GREEDY, load_qwen2, save_qwen2, serving

ATTENTION = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.down_proj")
PROMPTS = ((5, 9, 11, 2), (40, 3), (5, 9, 11, 2, 7, 30, 31), (17,), (5, 9, 11, 2), (60, 61, 62))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2")
    save_qwen2(folder, 2)
    return folder


def layers(names: tuple[str, ...]) -> list[str]:
    return [f"model.layers.{layer}.{name}" for layer in range(2) for name in names]


def write(folder: Path, model: Path, paths: list[str], rank: int, **settings: Any) -> Any:
    """Write an adapter as peft does; gives the model that it makes."""
    generator = torch.Generator().manual_seed(rank)
    adapted = load_qwen2(model)
    alpha = settings.get("lora_alpha", 2 * rank)
    scaling = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    tensors: dict[str, Tensor] = {}
    for path in paths:
        weight = adapted.get_submodule(path).weight
        a = torch.randn(rank, weight.shape[1], generator=generator) * 0.3
        b = torch.randn(weight.shape[0], rank, generator=generator) * 0.3
        weight.data += scaling * b @ a
        name = f"base_model.model.{path}"
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return adapted


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Any]]:
    """Two adapters of other layers and ranks, and the models that they make."""
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    paths = [*layers(MLP), "model.layers.1.self_attn.o_proj"]
    return [
        (first, write(first, model, layers(ATTENTION), 2)),
        (second, write(second, model, paths, 3, use_rslora=True)),
    ]


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {"draft_tokens": 2}),
        (2, {"tp": 2}),
        pytest.param(2, {"cp": 2}, marks=pytest.mark.slow),
    ],
    ids=["two stages with proposals", "cut", "spread"],
)
def test_rows_of_a_batch_have_their_own_adapters(
    ranks: int, changes: dict[str, Any], model: Path, adapters: list[tuple[Path, Any]]
) -> None:
    """Equal prompts of several adapters share no prefix."""
    loaded = [load_qwen2(model), *(adapted for _, adapted in adapters)]
    opened = open_model(model, adapters=[read_adapter(folder) for folder, _ in adapters])
    options = replace(GREEDY, batches=(6,), block_size=2, blocks=80, context=24, late=True)
    requests = [
        Request(number, prompt, 8, adapter=(number + turn) % 3)
        for turn in range(3)
        for number, prompt in enumerate(PROMPTS, len(PROMPTS) * turn)
    ]
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    with serving(opened, ranks, replace(options, **changes)) as engine:
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
            logits = loaded[request.adapter](ids).logits[0]
        greedy = logits[len(request.prompt) - 1 : -1].argmax(-1).tolist()
        assert tokens[request.id] == greedy, f"adapter {request.adapter}"
    assert len({tuple(tokens[number]) for number in (0, 6, 12)}) == 3


def test_ranks_cut_adapters_by_a_plan_that_is_derived() -> None:
    """Of GPT-2, whose class brings no plan; weights of its layers are [inputs, outputs]."""
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    names = {"attn.c_attn": (32, 96), "attn.c_proj": (32, 32)}
    factors = {
        f"transformer.h.{layer}.{name}": Factors(torch.ones(2, inputs), torch.ones(outputs, 2))
        for layer in range(2)
        for name, (inputs, outputs) in names.items()
    }
    model = open_model(config, adapters=[Adapter(Path("adapter"), factors)])
    plan = model.plan(range(2), None)
    attention = "part.model.transformer.h.1.attn"
    assert plan.of_tensor(f"{attention}.c_attn.weight") is not None
    (outputs,) = plan.of_tensor(f"{attention}.c_attn.lora.b").cuts
    (inputs,) = plan.of_tensor(f"{attention}.c_proj.lora.a").cuts
    assert (outputs[0], inputs[0]) == (0, 1)
    assert outputs[1].blocks == 3  # of queries, keys and values


def test_an_adapter_that_is_not_there_is_refused(
    model: Path, adapters: list[tuple[Path, Any]]
) -> None:
    opened = open_model(model, adapters=[read_adapter(folder) for folder, _ in adapters])
    limits = limits_of(opened, GREEDY)
    with pytest.raises(ValueError, match="adapter 3, of 2"):
        Scheduler(limits).add(Request(0, (1,), 1, adapter=3))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_dora": True}, "use_dora=True, and False or None is served"),
        ({"bias": "all"}, "bias='all', and 'none' is served"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', and True or"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"peft_type": "LOHA"}, "peft_type='LOHA', and 'LORA' is served"),
    ],
)
def test_other_adapters_are_refused(
    settings: dict[str, Any], reason: str, model: Path, tmp_path: Path
) -> None:
    write(tmp_path, model, layers(MLP), 2, **settings)
    with pytest.raises(ValueError, match=reason):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("adapter_model.safetensors", b"\xff" * 9, "safetensors is damaged: "),
        ("adapter_model.safetensors", b"", "safetensors is damaged: "),
        ("adapter_config.json", b'{"peft_type": "LORA"', "json is damaged: Expecting"),
        ("adapter_config.json", b"\xff\xfe", "json is damaged: 'utf-8'"),
        ("adapter_config.json", b"[]", "json is damaged: it has no settings"),
        ("adapter_config.json", b"{}", r"json: lora_alpha=None for model\.layers"),
        ("adapter_config.json", b'{"lora_alpha": "8"}', "json: lora_alpha='8' for"),
        ("adapter_config.json", b'{"alpha_pattern": [1]}', r"alpha_pattern=\[1\] has no numbers"),
        ("adapter_config.json", b'{"alpha_pattern": {"(": 1}}', r"alpha_pattern has '\(', no"),
    ],
)
def test_a_damaged_file_is_named(
    name: str, content: bytes, reason: str, model: Path, tmp_path: Path
) -> None:
    write(tmp_path, model, layers(MLP), 2)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        read_adapter(tmp_path)


def test_factors_of_bfloat16_are_scaled_in_float32(model: Path, tmp_path: Path) -> None:
    write(tmp_path, model, layers(MLP), 2, lora_alpha=2.2)
    file = tmp_path / "adapter_model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    for path, factors in read_adapter(tmp_path).layers.items():
        b = tensors[f"base_model.model.{path}.lora_B.weight"].float()
        assert torch.equal(factors.b, b * 1.1)


def test_files_of_adapters_are_looked_for_before_ranks_start(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = parser.parse_args(["--lora", f"one={tmp_path}", "--lora", f"two={tmp_path}"])
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        with pytest.raises(FileNotFoundError, match=f"holds no adapter of peft: it has no {file}"):
            adapters_of(given)
        (tmp_path / file).touch()
    assert list(adapters_of(given)) == ["one", "two"]


def test_factors_that_are_no_pairs_of_linear_layers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "lora_alpha": 1})
    )
    a = {"base_model.model.x.lora_A.weight": torch.ones(1, 2)}
    for tensors, reason in (
        (
            {"base_model.model.x.lora_embedding_A": torch.ones(1, 2)},
            "only factors of linear layers",
        ),
        (a, "has one factor of x, and not two"),
        ({}, "has one factor of no layer"),
        (a | {"base_model.model.x.lora_B.weight": torch.ones(3, 2)}, "of rank 1 and 2 for x"),
        (
            a | {"base_model.model.x.lora_B.weight": torch.ones(3, 1, dtype=torch.int8)},
            "only factors of linear layers",
        ),
    ):
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=reason):
            read_adapter(tmp_path)


def test_adapters_of_another_model_are_refused(model: Path, tmp_path: Path) -> None:
    write(tmp_path, model, layers(MLP), 2)
    adapter = read_adapter(tmp_path)
    path = "model.layers.0.mlp.gate_proj"
    factors = adapter.layers[path]
    missing = replace(adapter, layers={"model.layers.9.mlp.gate_proj": factors})
    with pytest.raises(ValueError, match="which is no linear layer of the model"):
        open_model(model, adapters=[missing])
    wide = replace(factors, a=torch.ones(2, 33))
    with pytest.raises(ValueError, match="from 33 to 48, which is from 32 to 48 in the model"):
        open_model(model, adapters=[replace(adapter, layers={path: wide})])
    with pytest.raises(ValueError, match="--lora is for models of transformers"):
        open_model(GptConfig(), adapters=[adapter])


class TakesWeight(nn.Module):
    """Multiplies by the weight of a layer that it does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.idles = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.runs(x) @ self.idles.weight


@pytest.mark.parametrize("path", ["runs", "idles"])
def test_an_adapter_that_would_change_nothing_is_refused(path: str) -> None:
    part, factors = TakesWeight(), Factors(torch.ones(1, 2), torch.ones(2, 1))
    adapters = [Adapter(Path("here"), {path: factors})]
    refuses = pytest.raises(ValueError, match="here adapts idles, whose weight the model takes")
    with refuses if path == "idles" else nullcontext(), must_run(part, adapters):
        part(torch.ones(1, 2))


def test_an_alpha_of_some_layers(model: Path, tmp_path: Path) -> None:
    write(tmp_path, model, layers(MLP), 2, lora_alpha=4)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    plain = read_adapter(tmp_path)
    settings["alpha_pattern"] = {"mlp.down_proj": 12}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    for path, factors in read_adapter(tmp_path).layers.items():
        times = 3 if path.endswith("down_proj") else 1
        torch.testing.assert_close(factors.b, times * plain.layers[path].b)
