"""Keys and values in float8: how near they are, how many bytes they take, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig
from transformers.utils import logging

from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from examples.serve.defaults import Given, Hardware, choose
from examples.serve.engine import start
from examples.serve.float8_cache import dequantize, quantize
from examples.serve.opening import open_model
from examples.serve.requests import Sampling

from ..sampling import examples
from .float8_oracle import Float8Cache
from .serve_driver import Driver, Habits, differences, random_requests
from .serve_models import FEW

GIB = 1 << 30
SMALLEST = 2.0**-14
"""Numbers that are smaller, beside the largest of a vector, have fewer bits."""
NEAR = 0.3
"""How far the logit of a token may be from the best one's, in deviations of its row."""


@examples(60)
@given(
    power=st.integers(-100, 100),
    width=st.integers(1, 40),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_numbers_keep_four_bits(power: int, width: int, seed: int, dtype: torch.dtype) -> None:
    """Whatever the size of a vector: the relative error of a number is at most 1/16."""
    generator = torch.Generator().manual_seed(seed)
    vectors = (torch.randn(2, 3, width, generator=generator) * 2.0**power).to(dtype)
    levels, exponents = quantize(vectors)
    assert (levels.dtype, exponents.dtype) == (torch.uint8, torch.uint8)
    assert (levels.shape, exponents.shape) == (vectors.shape, vectors.shape[:-1])
    error = (dequantize(levels, exponents, torch.float32) - vectors.float()).abs()
    size = vectors.float().abs()
    counts = size >= SMALLEST * size.amax(-1, keepdim=True)
    assert bool((error <= size / 16)[counts].all())
    assert bool((error <= size.amax(-1, keepdim=True) * SMALLEST / 16)[~counts].all())


def test_vectors_of_zeros_and_of_no_numbers_stay() -> None:
    vectors = torch.tensor([[0.0, 0.0], [torch.nan, 1.0], [2.0**-120, 0.0]])
    back = dequantize(*quantize(vectors), torch.float32)
    assert torch.equal(back[0], vectors[0])
    assert bool(back[1, 0].isnan())
    torch.testing.assert_close(back[2], vectors[2], rtol=1 / 16, atol=0)


def behind(logits: Tensor, tokens: list[int]) -> Tensor:
    """How far the logits of tokens are behind the best ones, in deviations of a row."""
    drawn = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return (logits.amax(1) - drawn) / logits.std(1)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tokens_are_near_those_of_the_full_cache(tp: int, tmp_path: Path) -> None:
    """They are those of a cache of transformers that rounds so; and the pools have bytes."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=64,
        max_position_embeddings=64,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    options = replace(
        FEW,
        groups=1,
        batches=(2,),
        chunks=(16,),
        prompt_tokens=32,
        warm=False,
        draws=False,
        tp=tp,
        kv_float8=True,
    )
    with use_world(VirtualWorld(tp)):
        engine = start(tmp_path, options)
        assert engine is not None
        requests = [
            replace(each, sampling=Sampling()) for each in random_requests(4, 3, engine.limits)
        ]
        Driver(engine, Habits(seed=3, chunk=16, companions=2)).run(requests)
        (stage,) = engine.graphs.stages
        buffers = next(iter(stage.instances.values())).named_buffers()
        pools = [tensor for name, tensor in buffers if name.startswith("pool")]
        engine.close()
    entries = options.blocks * options.block_size
    assert {tensor.dtype for tensor in pools} == {torch.uint8}
    assert sum(tensor.nbytes for tensor in pools) == 2 * entries * 2 * (16 + 2) // tp

    def rounded(ids: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(ids, past_key_values=Float8Cache()).logits
        return logits

    assert differences(rounded, requests)[0] == 0
    distances = []
    for request in requests:
        with torch.no_grad():
            full = model(torch.tensor([(*request.prompt, *request.out)])).logits[0]
        distances.append(behind(full[len(request.prompt) - 1 : -1], request.out))
    distance = torch.cat(distances)
    assert float(distance.max()) <= NEAR
    assert int((distance > 0).sum()) <= 0.2 * len(distance)


def llama() -> Any:
    return open_model(
        LlamaConfig(
            num_hidden_layers=4,
            hidden_size=512,
            num_attention_heads=8,
            num_key_value_heads=4,
            intermediate_size=512,
            vocab_size=1000,
            max_position_embeddings=4096,
        )
    )


def test_twice_the_blocks_fit() -> None:
    """Of 16 bits nearly twice as many: a head of 64 numbers has a byte for its scale."""
    model, hardware = llama(), Hardware("cuda", 8 * GIB, 4, has_triton=True)
    plain, small = (
        choose(hardware, model, torch.bfloat16, Given(kv_float8=kv_float8))
        for kv_float8 in (False, True)
    )
    ratio = small.options.blocks / plain.options.blocks
    assert 128 / 65 * 0.99 < ratio < 128 / 65 * 1.01
    assert small.options.kv_float8
    assert any("float8" in line for line in small.reasons)


def test_a_model_that_keeps_states_is_refused() -> None:
    config = MambaConfig(num_hidden_layers=1, hidden_size=32, vocab_size=64, state_size=4)
    hardware = Hardware("cpu", 8 * GIB, 4, has_triton=False)
    message = "layers of the model keep states of sequences, and --kv-dtype fp8 is for keys and"
    with pytest.raises(ValueError, match=message):
        choose(hardware, open_model(config), torch.float32, Given(kv_float8=True))
