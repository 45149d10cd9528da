"""Quantized folders are served as they are: the tokens of the model that computes with the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from examples.serve.engine import start
from examples.serve.requests import Sampling
from examples.serve.settings import Options

from ..models.quantized_folders import FORMS, Form, write
from .serve_driver import Driver, Habits, differences, random_requests
from .serve_models import FEW, logits_of

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


def serve(source: Any, ranks: int, options: Options, adapter: int = 0) -> list[Any]:
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
        *((name, 1, 1) for name in FORMS),
        *((name, 2, 2) for name in FORMS if name not in ("packed", "float8 tensor")),
        ("fp8", 2, 1),
    ],
)
def test_tokens_are_those_of_the_model(name: str, ranks: int, tp: int, tmp_path: Path) -> None:
    model = save(tmp_path, FORMS[name])
    requests = serve(tmp_path, ranks, replace(LEAN, tp=tp))
    assert differences(logits_of(model), requests)[0] == 0
