"""Decoders of transformers give its tokens, although they run over pages with joined products."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.utils import logging

from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from examples.serve import projections
from examples.serve.engine import start
from examples.serve.opening import open_model
from examples.serve.parts import Ways
from examples.serve.products import Joined, RmsNorm, project
from examples.serve.projections import Projection
from examples.serve.requests import Sampling

from ..models.decoders import config_of
from ..sampling import scale
from .serve_driver import Driver, Habits, differences, random_requests
from .serve_models import FEW, logits_of


@pytest.fixture(autouse=True)
def packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the weights of tiny models packed as those of large ones are on hosts."""
    monkeypatch.setattr(projections, "SMALL", 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


SHAPE: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama with biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama of another context": LlamaConfig(
        **SHAPE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "mistral": MistralConfig(**SHAPE, head_dim=16, sliding_window=None),
    "mistral with a window": MistralConfig(**SHAPE, head_dim=16, sliding_window=9),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "smollm3": SmolLM3Config(**{**SHAPE, "num_hidden_layers": 2}, no_rope_layer_interval=2),
}


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        *((name, 1) for name in CONFIGS if name != "mistral with a window"),
        *((name, 2) for name in ("llama with biases", "mistral with a window", "qwen3")),
    ],
)
def test_tokens_are_those_of_transformers(name: str, tp: int, tmp_path: Path) -> None:
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 1.0 if parameter.mean() == 1 else 0.0, 0.2)
    model.save_pretrained(tmp_path)
    options = replace(
        FEW,
        groups=1,
        batches=(2,),
        chunks=(16,),
        prompt_tokens=32,
        warm=False,
        draws=False,  # a family has a say in logits alone
        tp=tp,
        # By default one family has all variants, also that of prompts together.
        late=scale() == 1 and name != "mistral with a window",
    )
    with use_world(VirtualWorld(tp)):
        engine = start(tmp_path, options)
        assert engine is not None
        requests = [
            replace(each, sampling=Sampling()) for each in random_requests(4, 3, engine.limits)
        ]
        Driver(engine, Habits(seed=3, chunk=16, companions=2)).run(requests)
        engine.close()
    assert differences(logits_of(model), requests)[0] == 0


@pytest.mark.parametrize("own", [{"eos_token_id": 5}, {"eos_token_id": [5, 7]}, {}, None])
@pytest.mark.parametrize("said", [3, [3, 4], None])
def test_ends_of_texts_are_those_of_generate(own: Any, said: Any, tmp_path: Path) -> None:
    """Those of generation_config.json, if there is one; else those of config.json."""
    logging.disable_progress_bar()
    config = LlamaConfig(**{**SHAPE, "eos_token_id": said})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    file.unlink() if own is None else file.write_text(json.dumps(own))
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id
    found = open_model(tmp_path).eos
    assert found == (() if wanted is None else tuple(torch.tensor(wanted).view(-1).tolist()))


@pytest.mark.parametrize("stored", ["both", "equal", "head", "embedding"])
def test_a_head_is_tied_if_it_is_stored_so(
    stored: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers, whatever the configuration says."""
    logging.disable_progress_bar()
    config = LlamaConfig(**SHAPE, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    if stored != "embedding":
        tensors["lm_head.weight"] = embedding.clone() if stored == "equal" else embedding.flip(0)
    if stored == "head":
        del tensors["model.embed_tokens.weight"]
    save_file({name: each.contiguous() for name, each in tensors.items()}, file, {"format": "pt"})
    oracle: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with caplog.at_level("INFO", "serve"):
        model = open_model(tmp_path)
    part: Any = model.build(range(1), torch.float32, Ways(2))  # so nothing is packed
    served = part.part.model
    torch.testing.assert_close(served.model.embed_tokens.weight, oracle.model.embed_tokens.weight)
    torch.testing.assert_close(served.lm_head.weight, oracle.lm_head.weight)
    assert (served.lm_head.weight is served.model.embed_tokens.weight) == (stored != "both")
    said = [each for each in caplog.messages if "a head that is not its" in each]
    assert len(said) == (stored == "both")


def test_positions_that_depend_on_the_length() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    said = r"model\.rotary_emb \(LlamaRotaryEmbedding\) makes rotary positions of type 'dynamic'"
    with pytest.raises(ValueError, match=said):
        open_model(LlamaConfig(**SHAPE, rope_parameters=rope))


REFUSED = {
    "openai-gpt": r"its forward takes no input_ids, or no past_key_values",
    "roberta": r"RobertaSelfAttention attends to keys that are not in its cache, as a layer",
    "hrm_text": r"HrmTextForCausalLM runs model\.L_module\.layers\.0 out of order",
    # A window of its own, that it counts from the length of the cache.
    "gpt_neo": r"transformer\.h\.1\.attn\.attention\.\w+ \(\w+\) gives other values over pages",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"{kind}\) is not served: {REFUSED[kind]}"):
        open_model(config_of(kind)).build(range(2), torch.float32, Ways())


def test_a_scale_by_the_length_of_the_cache() -> None:
    """It would be wrong beyond 8192 tokens: where rows are shown as many, it is noticed."""
    config = config_of("llama4_text")
    config.no_rope_layers, config.max_position_embeddings = [1, 0], 1 << 17
    config.initializer_range = 0.5
    model = open_model(config)
    assert model.context == 1 << 14  # which is all that is looked at
    with pytest.raises(ValueError, match=r"model\.layers\.1\.\S+ \(\w+\) gives other values"):
        model.build(range(2), torch.float32, Ways())


def test_products_of_one_input_are_joined() -> None:
    """Three of attention and two of an MLP, which are told by what they take."""
    part = open_model(CONFIGS["qwen3"]).build(range(1), torch.float32, Ways(2))
    joined = {name: each for name, each in part.named_modules() if isinstance(each, Joined)}
    assert {name.rpartition(".")[2]: each.sizes for name, each in joined.items()} == {
        "q_proj": [32, 16, 16],
        "gate_proj": [24, 24],
    }
    norms = [type(each) for each in part.modules() if type(each).__name__.endswith("Norm")]
    assert norms == [RmsNorm] * 5  # two of heads


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_values_that_a_model_changes_behind_its_cache() -> None:
    """Diffllama joins values of heads, and leaves their keys as they are."""
    open_model(config_of("diffllama")).build(range(2), torch.float32, Ways())


@pytest.mark.parametrize("rows", [1, 3, 8, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_weights(rows: int, bias: bool) -> None:
    plain = nn.Linear(24, 40, bias)
    packed, x = Projection(plain), torch.randn(rows, 1, 24)
    with torch.no_grad():
        torch.testing.assert_close(packed(x), plain(x))
    assert packed.weight.isnan().all()  # whoever reads it gets no number
    assert packed.weight.untyped_storage().nbytes() == 4


def test_only_float32_is_packed() -> None:
    module = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4).bfloat16()})
    project(module)
    kinds = [Projection if torch.backends.mkldnn.is_available() else nn.Linear, nn.Linear]
    assert [type(each) for each in module.values()] == kinds


@pytest.mark.parametrize("bias", [False, True])
def test_small_weights_are_transposed(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "SMALL", 25)
    module = nn.Sequential(nn.Linear(4, 6, bias), nn.Linear(6, 5, bias))
    x = torch.randn(3, 1, 4)
    with torch.no_grad():
        wanted = module(x)
        project(module)
        torch.testing.assert_close(module(x), wanted)
    strides = (1, 6) if torch.backends.mkldnn.is_available() else (4, 1)
    assert module[0].weight.stride() == strides
    assert module[1].weight.isnan().all() == torch.backends.mkldnn.is_available()
