"""Small models for tests of the engine, with weights that tell tokens well apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from examples.serve.engine import CgEngine, start
from examples.serve.settings import Options

OPTIONS = Options(batches=(2, 4), chunks=(8, 32), prompt_tokens=96, blocks=20, block_size=8)
"""Two groups on two ranks, and three prompts of a prefill: 26 variants, which is what the tests
spend most time on."""

FEW = replace(OPTIONS, groups=2, batches=(4,), chunks=(32,), widths=())

GREEDY = replace(FEW, groups=1, draws=False)
"""For tests that need no other tokens: four of thirteen variants."""


@contextmanager
def serving(source: Any, ranks: int, options: Options) -> Iterator[CgEngine]:
    """An engine whose ranks this process plays.

    With one thread: the models are so small that a second one is only waited for.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with use_world(VirtualWorld(ranks)):
            engine = start(source, options)
            assert engine is not None
            yield engine
            engine.close()
    finally:
        torch.set_num_threads(threads)


def save_qwen2(folder: Path, layers: int) -> None:
    """Write a Qwen2 of random weights and biases in transformers' format."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            num_hidden_layers=layers,
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            vocab_size=64,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            initializer_range=0.2,
            eos_token_id=None,
            bos_token_id=None,
        )
    )
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)


def load_qwen2(folder: Path) -> Any:
    """The model as transformers loads it."""
    return Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits_of(model: Any) -> Any:
    """A function from ids to logits, as `differences` takes it."""

    def logits(ids: Tensor) -> Tensor:
        return model(ids).logits

    return logits


def generate(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    """The tokens that transformers generates greedily."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()
