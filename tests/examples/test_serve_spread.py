"""Sequences whose keys and values lie on several ranks give the tokens of `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
)
from transformers.masking_utils import causal_mask_function
from transformers.utils import logging

from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from examples.serve import __main__ as command
from examples.serve.attention import PagedCache, attend, attend_spread
from examples.serve.checks import check_chunks
from examples.serve.engine import CgEngine, start
from examples.serve.opening import open_model
from examples.serve.pages import Pages
from examples.serve.parts import Ways
from examples.serve.requests import Request, Sampling
from examples.serve.settings import Options
from examples.serve.spread import SpreadPages
from examples.serve.variants import DecodeSize, PrefillSize

from ..models.decoder_serving import generated
from ..models.decoder_serving import serve as serve_prompts
from ..models.decoders import config_of
from ..mpi.jobs import ROOT, needs_mpi, run
from ..sampling import examples
from .serve_driver import Driver, Habits, differences, random_requests
from .serve_models import FEW, generate, load_qwen2, logits_of, save_qwen2, serving
from .serve_requests import guesses, nothing, serve
from .serve_work import Row, decode_of, prefill_of

slow = pytest.mark.slow

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 112,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=9),
    "gemma2": Gemma2Config(**SHAPE, sliding_window=9, query_pre_attn_scalar=8),
    "gpt_oss": GptOssConfig(**SHAPE, sliding_window=9, num_local_experts=4, num_experts_per_tok=2),
}
"""Without more, with biases, with a window, with soft caps as well, and with sinks and experts."""
OPTIONS = Options(
    groups=1,
    batches=(2,),
    chunks=(16,),
    prompt_tokens=32,
    blocks=16,
    block_size=4,
    widths=(),
    warm=False,
    draws=False,
)
COUNT = 8
CROWDED = {2: (16, 56), 3: (12, 60)}
"""By the number of ranks, blocks that hold two prompts of a length, and one of their answers."""


def model_of(name: str) -> Any:
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    for parameter in model.parameters():
        noise = 0.2 * torch.randn_like(parameter)
        parameter.data = noise + (parameter.data if parameter.ndim == 1 else 0)
    model.generation_config.eos_token_id = None
    return model


def requests(lengths: Sequence[int], vocabulary: int = 64) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    return [
        Request(
            number,
            tuple(torch.randint(vocabulary, (length,), generator=generator).tolist()),
            COUNT,
        )
        for number, length in enumerate(lengths)
    ]


def pools(engine: CgEngine) -> dict[int, list[Tensor]]:
    """The pools of each rank."""
    return {
        rank: [pool for name, pool in part.named_buffers() if name.startswith("pool")]
        for stage in engine.graphs.stages
        for rank, part in stage.instances.items()
    }


@pytest.mark.parametrize(
    ("name", "ranks", "ways"),
    [
        ("llama", 2, {"cp": 2}),
        *(
            pytest.param(name, ranks, ways, marks=slow)
            for name, ranks, ways in [
                ("llama", 4, {"cp": 2, "tp": 2}),
                *((name, ranks, {"cp": ranks}) for name in CONFIGS for ranks in (2, 3)),
                *((name, 4, {"cp": 2}) for name in ("qwen2", "gemma2")),
                ("gpt_oss", 4, {"cp": 2, "ep": 2}),
                ("gemma2", 4, {"cp": 2, "tp": 2}),
            ]
            if (name, ways) != ("llama", {"cp": 2})
        ),
    ],
)
def test_tokens_are_those_of_generate(
    name: str, ranks: int, ways: dict[str, int], tmp_path: Path
) -> None:
    """Requests of mixed lengths share batches, and lose their blocks to others.

    A rank has a part of the blocks' tokens: all together have room for what one would.
    """
    model = model_of(name)
    model.save_pretrained(tmp_path)
    blocks, length = CROWDED[ways["cp"]]
    asked = requests((length, length, 100, 1, 5, 21))
    options = replace(OPTIONS, blocks=blocks, **ways)
    with serving(tmp_path, ranks, options) as engine:
        served = serve(engine, asked)
        held = pools(engine)
    for request in asked:
        assert served.tokens[request.id] == generate(model, request.prompt, COUNT)
    assert served.preemptions
    cp, tp = options.cp, options.tp
    assert engine.limits.block_size == 4 * cp
    assert blocks * 4 < 100 < engine.limits.context  # too many for one rank
    layers = 2 * cp * tp * options.ep // ranks
    assert {rank: [tuple(pool.shape) for pool in own] for rank, own in held.items()} == {
        rank: [(1, blocks * 4, 2 // tp, 16)] * layers for rank in range(ranks)
    }


def test_ranks_share_a_sequence_and_its_products(tmp_path: Path) -> None:
    """Of 21 tokens and two more, runs of 3 lie on three ranks, where blocks say.

    Of a chunk of 16 tokens, ranks compute the products of 5, 5 and 6; costs say 5 for all of them.
    """
    model = model_of("llama")
    model.save_pretrained(tmp_path)
    blocks, run_length, cp = (4, 2, 5), 3, 3
    (request,) = requests((21,))
    with serving(tmp_path, cp, replace(OPTIONS, block_size=run_length, cp=cp)) as engine:
        engine.submit(prefill_of(request.prompt[:16], 0, blocks, False, Sampling())).result()
        tokens = engine.submit(
            prefill_of(request.prompt[16:], 16, blocks, True, Sampling())
        ).result()
        for position in (21, 22):
            row = Row(tokens[-1], position, 0, blocks, Sampling())
            tokens += engine.submit(decode_of(0, (row,))).result()
        held = pools(engine)
        work = {
            size: [cost.flops for cost in graph.cost_analysis()]
            for size, (graph,) in engine.graphs.compiled.items()
        }
    assert tokens == generate(model, request.prompt, 3)
    head = 2 * 32 * 64
    (decode,) = (flops for size, flops in work.items() if isinstance(size, DecodeSize))
    layers = decode[0] // 2 - head  # of a token, of which a batch has two
    assert decode == [2 * (layers + head)] * cp
    prefills = {size: flops for size, flops in work.items() if isinstance(size, PrefillSize)}
    assert {(size.rows, size.width > 0) for size in prefills} == {(1, False), (1, True), (2, False)}
    for size, flops in prefills.items():
        assert flops == [size.rows * (16 // cp * layers + head)] * cp
    known = torch.tensor([[*request.prompt, *tokens[:2]]])
    with torch.no_grad():
        cache = model(known, use_cache=True).past_key_values
    for layer in range(2):
        right = torch.cat([cache.layers[layer].keys, cache.layers[layer].values], -1)[0]
        for position in range(known.shape[1]):
            run, at = divmod(position, run_length)
            entry = blocks[run // cp] * run_length + at
            own = held[run % cp][layer][0, entry]
            torch.testing.assert_close(own, right[:, position], rtol=1e-4, atol=1e-5)
            others = [held[rank][layer][0, entry] for rank in range(cp) if rank != run % cp]
            assert not any(torch.equal(other, own) for other in others)


@examples(60)
@given(
    ranks=st.integers(2, 4),
    size=st.integers(1, 3),
    starts=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    tokens=st.integers(1, 4),
    window=st.sampled_from([None, 1, 5]),
    cap=st.sampled_from([0.0, 2.0]),
    has_sinks=st.booleans(),
    is_float8=st.booleans(),
)
def test_parts_are_joined_to_the_whole(
    ranks: int,
    size: int,
    starts: list[int],
    tokens: int,
    window: int | None,
    cap: float,
    has_sinks: bool,
    is_float8: bool,
) -> None:
    """What pages on one rank show, weighed by hand; values are narrower than keys."""
    generator = torch.Generator().manual_seed(ranks)
    rows, groups, shared, span = len(starts), 2, 2, size * ranks
    width = -(-(max(starts) + tokens) // span)
    positions = torch.tensor(starts)[:, None] + torch.arange(tokens)
    tables = 1 + torch.randperm(rows * width, generator=generator).view(rows, width)
    entries = tables.gather(1, positions // span) * span + positions % span
    pool = torch.randn((1 + rows * width) * span, groups, 14, generator=generator)
    runs = pool.view(-1, ranks, size, groups, 14).transpose(0, 1).reshape(ranks, -1, groups, 14)
    key, value = (torch.randn(rows, groups, tokens, n, generator=generator) for n in (8, 6))
    query = torch.randn(rows, groups * shared, tokens, 8, generator=generator)
    sinks = torch.randn(groups * shared, generator=generator) if has_sinks else None

    def sees(row: Tensor, head: Tensor, token: Tensor, at: Tensor) -> Tensor:
        return (at <= token) & (at > token - window) if window else at <= token

    more: list[dict[str, Any]] = [{}, {}]
    if is_float8:
        bytes_, powers = (
            torch.randint(0, 120, pool.shape, generator=generator).byte(),
            torch.randint(125, 130, (*pool.shape[:-1], 2), generator=generator).byte(),
        )
        pool, exponents = bytes_, powers

        def by_ranks(one: Tensor) -> Tensor:
            spread = one.view(-1, ranks, size, groups, one.shape[-1]).transpose(0, 1)
            return spread.reshape(ranks, -1, groups, one.shape[-1])

        runs = by_ranks(pool)
        more = [{"exponents": {0: exponents}}, {"exponents": {0: by_ranks(exponents)}}]
    where = positions, entries.flatten(), tables
    whole = PagedCache(Pages({0: pool}, span, *where, **more[0]))
    parted = PagedCache(SpreadPages({0: runs}, size, *where, ranks=ranks, **more[1]))
    kind = sees if window else causal_mask_function
    mask = parted.mask(kind, torch.float32)
    keys, values = whole.update(key, value, 0)
    scores = query @ keys.repeat_interleave(shared, 1).mT * 0.3
    scores = (scores / cap).tanh() * cap if cap else scores
    scores = scores + whole.mask(kind, torch.float32)
    if sinks is not None:
        columns = sinks.view(1, -1, 1, 1).expand(rows, -1, tokens, 1)
        scores = torch.cat([scores, columns], -1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    right = (weights @ values.repeat_interleave(shared, 1)).transpose(1, 2)
    new = parted.update(key, value, 0)
    out = attend_spread(query, *new, mask, 0.3, parted, cap, sinks)
    torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-4)
    if not cap and sinks is None:
        torch.testing.assert_close(attend(query, *new, mask, 0.3, parted), out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2")
    save_qwen2(folder, 2)
    return folder


@slow
def test_all_kinds_of_sampling(folder: Path) -> None:
    """Greedy, sampled and adjusted tokens, prefixes that are shared, and preemptions."""
    options = replace(FEW, groups=1, cp=2, block_size=4)
    with serving(folder, 2, options) as engine:
        asked = random_requests(24, 11, engine.limits, share=0.4)
        driver = Driver(engine, Habits(seed=11, preempting=0.05, cancelling=0.01))
        driver.run(asked)
    assert differences(logits_of(load_qwen2(folder)), asked)[0] == 0
    assert driver.hits
    assert driver.preempted


@slow
@pytest.mark.parametrize("has_draft", [False, True])
def test_proposed_tokens_are_verified(has_draft: bool, folder: Path) -> None:
    options = replace(FEW, groups=1, cp=2, block_size=4, draws=False, draft_tokens=3)
    options = replace(options, draft=folder if has_draft else None)
    model, asked = load_qwen2(folder), requests((21, 1, 40, 5))
    right = {each.id: generate(model, each.prompt, COUNT) for each in asked}
    with serving(folder, 2, options) as engine:
        served = serve(engine, asked, nothing if has_draft else guesses(right, 0.7, 64))
    assert served.tokens == right
    assert served.speculation.accepted_tokens > 4


@slow
def test_keys_in_float8_are_those_of_one_rank(folder: Path) -> None:
    asked = requests((21, 1, 40, 5))
    options = replace(FEW, groups=1, draws=False, kv_float8=True)
    tokens = []
    for ranks in (1, 2):
        with serving(folder, ranks, replace(options, cp=ranks, block_size=8 // ranks)) as engine:
            tokens.append(serve(engine, asked).tokens)
    assert tokens[0] == tokens[1]


@slow
@pytest.mark.parametrize("kind", ["cohere2", "gemma3_text", "llama4_text", "phi3", "qwen3_moe"])
def test_other_decoders(kind: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(config_of(kind), attn_implementation="eager")
    serve_prompts(model, generated(model), tmp_path, ranks=2, cp=2)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("mamba", "keep states of sequences, and --cp 2 spreads"),
        ("deepseek_v3", "it changes keys or values, of which each rank has a part; one rank serv"),
        pytest.param(
            "bloom", "over pages it raises .*; one rank serves it, so leave out --cp", marks=slow
        ),
        pytest.param("gpt_neo", "than in the model's own forward$", marks=slow),
    ],
)
def test_models_that_are_refused(kind: str, said: str) -> None:
    """Those that are served on one rank say so, and others what they say there."""
    with use_world(VirtualWorld(2)), pytest.raises(ValueError, match=said):
        start(open_model(config_of(kind)), replace(OPTIONS, cp=2))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cp": 3}, "2 ranks by 3 for each stage do not fit .* --tp times --ep times --cp has to"),
        ({"cp": 0}, "--cp 0 are numbers of ranks"),
        ({"cp": 2, "chunks": (1, 8)}, "a chunk of 1 tokens cannot be shared by the 2 ranks"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], said: str, folder: Path) -> None:
    with use_world(VirtualWorld(2)), pytest.raises(ValueError, match=said):
        start(folder, replace(OPTIONS, **options))


def test_kernels_of_devices_share_multiples_of_32() -> None:
    check_chunks((64, 96), Ways(cp=2), on_host=False)
    check_chunks((64, 100), Ways(), on_host=False)
    with pytest.raises(ValueError, match="chunks of 64, 100 tokens, of which the 2 ranks of --cp"):
        check_chunks((64, 100), Ways(cp=2), on_host=False)


class Neighbours(nn.Module):
    """Adds what the token ahead has, of which another rank may have the first."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


@slow
def test_code_that_needs_other_tokens_is_refused_at_the_start() -> None:
    """The start check cannot know: it runs all tokens on one rank."""
    model = open_model(CONFIGS["llama"])

    def build(layers: range, dtype: torch.dtype, ways: Ways) -> nn.Module:
        part: Any = model.build(layers, dtype, ways)
        part.part.model.model.norm = Neighbours()
        return part

    said = "--cp 2 gives ranks some of the tokens of a chunk, .* leave it out: aten.constant_pad_nd"
    with use_world(VirtualWorld(2)), pytest.raises(ValueError, match=said):
        start(replace(model, build=build), replace(OPTIONS, cp=2, late=True))


def test_the_front_passes_it_on() -> None:
    parsed = command._parse(["-n", "4", "--tp", "2", "--cp", "2"])
    assert "--cp=2" in command.job(parsed, "DIR", command.switches.parse(""))


@slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("ranks", "on_devices"),
    [
        pytest.param(2, False, marks=needs_mpi),
        pytest.param(3, False, marks=needs_mpi),
        pytest.param(2, True, marks=needs_mpi),
    ],
)
def test_on_mpi_ranks(ranks: int, on_devices: bool, folder: Path) -> None:
    """On fake devices graphs are whole, with all exchanges in them."""
    job = ["tests.examples.serve_job", str(folder), "16", "1", str(ranks)]
    program = ["-m", *(["tests.mpi.device_job"] if on_devices else []), *job]
    ended = run(ranks, program, folder=ROOT, seconds=380, warm=True)
    assert ended.code == 0, ended.output
    assert f"rank {ranks - 1} has served" in ended.output
    assert ("13 of 13 whole, 13 replayed" in ended.output) == on_devices, ended.output
    assert "16 requests" in ended.output
    assert ": 0 differences" in ended.output
