"""Sizes that nobody gives: what a server chooses on a GPU that is not here, and on hosts."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ...mpi.jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))

from transformers import LlamaConfig, Qwen2Config

from examples.serve.defaults import GIB, INDEXED, Given, Hardware, _weights, choose, measure
from examples.serve.gpt import GptConfig
from examples.serve.opening import open_model
from examples.serve.parts import Model
from examples.serve.settings import Options

H200 = Hardware("cuda", 139 * GIB, 16, has_triton=True)
HOST = Hardware("cpu", 20 * GIB, 2, has_triton=False)


def qwen2(**sizes: Any) -> Qwen2Config:
    shape = {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
    }
    return Qwen2Config(**{**shape, **sizes})


def llama(**sizes: Any) -> LlamaConfig:
    shape = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }
    return LlamaConfig(**{**shape, **sizes})


def opened(**sizes: int) -> Model:
    """A Llama, by a look at one of its layers, which are alike."""
    count = llama(**sizes).num_hidden_layers
    one = _of_one_layer(tuple(sorted((sizes | {"num_hidden_layers": 1}).items())))
    return replace(one, layers=count, caches=dict.fromkeys(range(count), one.caches[0]))


@functools.cache
def _of_one_layer(sizes: tuple[tuple[str, int], ...]) -> Model:
    return open_model(llama(**dict(sizes)))


@functools.cache
def small_qwen2() -> Model:
    return open_model(qwen2())


def llama_8b() -> Model:
    return opened()


def llama_70b() -> Model:
    return opened(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
    )


def smollm2() -> Model:
    return opened(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
    )


def chosen(hardware: Hardware, model: Model, **by_hand: Any) -> Options:
    return choose(hardware, model, torch.bfloat16, Given(**by_hand)).options


def pools(model: Model, options: Options, layers: int) -> int:
    """Bytes of a rank's pools."""
    entry = model.entry // options.tp * options.dtype.itemsize
    return options.blocks * options.block_size * entry * layers


@pytest.mark.parametrize("opening", [small_qwen2, llama_8b])
def test_a_gpu_is_filled(opening: Callable[[], Model]) -> None:
    model = opening()
    options = chosen(H200, model)
    assert (options.dtype, options.fuse) == (torch.bfloat16, "inductor")
    assert options.batches == (8, 32, 64, 128, 256)
    assert (options.chunks, options.prompt_tokens) == ((64, 256, 1024), 16 * 1024)
    assert options.context == model.context
    assert options.late
    assert options.blocks * options.block_size >= 256 * 2048
    assert 0.6 * 139 * GIB < pools(model, options, model.layers) < 0.9 * 139 * GIB


def test_what_a_gpu_gets_for_each_shape() -> None:
    small, large = chosen(H200, small_qwen2()), chosen(H200, llama_8b())
    assert small.widths == (4096 // 64, 16384 // 64, 32768 // 64)
    assert large.widths == (4096 // 64, 16384 // 64, 65536 // 64, 131072 // 64)
    # Kernels index a layer's pool by 32 bits, which is less than there is room for.
    assert small.blocks * 64 * 2 * 64 * 2 <= INDEXED < (small.blocks + 1) * 64 * 2 * 64 * 2


def test_what_is_given_stays() -> None:
    options = chosen(
        H200,
        llama_8b(),
        dtype="float16",
        fuse="none",
        blocks=1000,
        block_size=32,
        context=4000,
        batch=48,
        batches=(3, 64),
        chunk=100,
        chunks=(),
        prompt_tokens=400,
        groups=3,
        layers=(32,),
    )
    assert (options.dtype, options.fuse) == (torch.float16, None)
    assert (options.blocks, options.block_size, options.context) == (1000, 32, 4000)
    assert (options.batches, options.chunks, options.prompt_tokens) == ((3, 48), (100,), 400)
    assert (options.groups, options.in_flight, options.layers) == (3, 3, (32,))


@pytest.mark.parametrize(
    ("stored", "kind", "dtype"),
    [
        (torch.bfloat16, "cuda", torch.bfloat16),
        (torch.float16, "cuda", torch.float16),
        (torch.float32, "cuda", torch.float32),
        (torch.bfloat16, "cpu", torch.float32),
        (torch.bfloat16, "fake", torch.float32),
    ],
)
def test_the_dtype_is_the_checkpoints_on_devices(
    stored: torch.dtype, kind: str, dtype: torch.dtype
) -> None:
    choice = choose(replace(H200, kind=kind), small_qwen2(), stored, Given())
    assert choice.options.dtype is dtype


def test_without_triton_nothing_is_fused() -> None:
    assert chosen(replace(H200, has_triton=False), small_qwen2()).fuse is None
    assert chosen(HOST, small_qwen2()).fuse is None
    assert chosen(HOST, small_qwen2(), fuse="inductor").fuse == "inductor"


def test_a_host_takes_rows_by_its_cores() -> None:
    options = chosen(HOST, smollm2())
    assert (options.batches, options.chunks) == ((1, 2, 4, 8), (32, 128, 512))
    assert (options.first_chunk, options.block_size, options.context) == (128, 16, 8192)
    assert options.widths == (32, 128, 512)
    # As many as 8 sequences of 8,192 tokens need, and no more of a host's memory.
    assert options.blocks == 1 + 8 * 512
    assert chosen(replace(HOST, cores=8), smollm2()).batches[-1] == 32
    assert chosen(replace(HOST, cores=200), smollm2()).batches[-1] == 64


def test_a_small_host_takes_shorter_sequences() -> None:
    options = chosen(replace(HOST, free=1 * GIB), smollm2())
    assert options.context == (options.blocks - 1) * 16 < 8192
    assert pools(smollm2(), options, 30) <= 0.25 * GIB


def test_a_small_gpu_takes_fewer_requests() -> None:
    """Each has room for 512 tokens."""
    options = chosen(replace(H200, free=22 * GIB), llama_8b(), context=4096)
    tokens = (options.blocks - 1) * options.block_size
    assert options.batches[-1] < 256
    assert options.batches[-1] * 512 <= tokens < (options.batches[-1] + 1) * 512
    assert options.batches == (
        *(n for n in (8, 32, 64, 128) if n < options.batches[-1]),
        options.batches[-1],
    )


def test_ranks_share_weights_and_pools() -> None:
    """In stages, and cut: two ranks hold about twice the tokens of one, and more than twice where
    weights take much of it.
    """
    hardware = replace(H200, free=64 * GIB)
    one = chosen(hardware, llama_8b()).blocks
    stages, cut = chosen(hardware, llama_8b(), ranks=2), chosen(hardware, llama_8b(), ranks=2, tp=2)
    assert 2 * one < stages.blocks < 4 * one
    assert 2 * one < cut.blocks < 4 * one
    with pytest.raises(ValueError, match=r"weights take 13\d\.\d: that leaves no room"):
        chosen(H200, llama_70b())
    assert chosen(H200, llama_70b(), ranks=4, tp=2).blocks > 2000


def test_ranks_that_share_sequences_hold_more_of_them() -> None:
    """Each has as many blocks as one rank, and a part of the tokens of every block."""
    one, two = chosen(H200, llama_8b()), chosen(H200, llama_8b(), ranks=2, cp=2)
    assert one.blocks <= two.blocks < 1.1 * one.blocks  # attention has shorter sums
    assert (one.span, two.span, two.block_size) == (64, 128, 64)
    assert two.widths == (4096 // 128, 16384 // 128, 65536 // 128, 131072 // 128)
    host = {"ranks": 2, "cp": 2, "blocks": 5, "block_size": 4}
    assert chosen(HOST, smollm2(), **host).context == 32
    said = "4 blocks of 4 tokens on each of 2 ranks hold no sequence of 33"
    with pytest.raises(ValueError, match=said):
        chosen(HOST, smollm2(), **host, context=33)
    lines = choose(H200, llama_8b(), torch.bfloat16, Given(ranks=2, cp=2)).reasons
    assert lines[1].startswith(f"{two.blocks} blocks of 64 tokens on each of 2 ranks: of 139.0 GiB")
    # A draft has the whole blocks, on one rank.
    draft = open_model(llama(hidden_size=1024, num_hidden_layers=4, num_attention_heads=16))
    given_draft = {"ranks": 2, "draft_tokens": 4, "draft": draft}
    spread = chosen(H200, llama_8b(), cp=2, **given_draft).blocks
    assert spread < chosen(H200, llama_8b(), tp=2, **given_draft).blocks


def test_more_memory_holds_more() -> None:
    blocks = [chosen(H200, llama_8b(), memory=share).blocks for share in (0.5, 0.7, 0.9)]
    assert blocks == sorted(set(blocks))


def test_a_given_context_that_no_pool_holds() -> None:
    with pytest.raises(ValueError, match="4 blocks of 4 tokens hold no sequence of 17: give more"):
        chosen(HOST, smollm2(), blocks=5, block_size=4, context=17)
    assert chosen(HOST, smollm2(), blocks=5, block_size=4).context == 16
    assert chosen(HOST, smollm2(), blocks=5, block_size=4, context=12).context == 12


def test_a_model_of_short_sequences() -> None:
    options = chosen(HOST, open_model(GptConfig()))
    assert (options.context, options.widths, options.chunks) == (128, (8,), (32, 128))


def test_five_lines_say_why() -> None:
    lines = choose(H200, small_qwen2(), torch.bfloat16, Given()).reasons
    assert len(lines) == 5
    assert lines[0] == "bfloat16, as the checkpoint has it; fused by inductor, for Triton is there"
    assert "of 139.0 GiB that are free for a rank, weights take" in lines[1]
    assert lines[2].startswith("256 requests at a time, as a cuda device takes them: batches of 8,")
    assert lines[3] == "prompts in chunks of 64, 256, 1024 tokens, at most 16 at once"
    assert lines[4] == "sequences of at most 32768 tokens, as the model takes"


@pytest.mark.parametrize(("ranks", "tp"), [(1, 1), (2, 1), (2, 2)])
def test_a_draft_takes_room_of_the_first_rank(ranks: int, tp: int) -> None:
    draft = open_model(llama(hidden_size=1024, num_hidden_layers=4, num_attention_heads=16))
    alone = choose(H200, llama_8b(), torch.bfloat16, Given(ranks=ranks, tp=tp)).options
    choice = choose(
        H200, llama_8b(), torch.bfloat16, Given(ranks=ranks, tp=tp, draft_tokens=4, draft=draft)
    )
    options = choice.options
    assert options.draft is draft
    assert choice.reasons[-1] == "4 tokens at a time are proposed by a draft on the first rank"
    assert options.blocks < alone.blocks
    stages = ranks // tp
    own = pools(llama_8b(), options, -(-llama_8b().layers // stages)) // tp
    whole = replace(options, tp=1)
    taken = own + pools(draft, whole, draft.layers) + _weights(draft, 4, True, True, whole)
    taken += _weights(llama_8b(), llama_8b().layers // stages, True, stages == 1, options)
    assert 0.4 * H200.free < taken < H200.free
    # Logits are of all positions.
    ngram = choose(H200, llama_8b(), torch.bfloat16, Given(ranks=ranks, tp=tp, draft_tokens=4))
    assert options.blocks < ngram.options.blocks <= alone.blocks  # a pool has a largest size


def test_ranks_take_what_the_least_of_them_has() -> None:
    other = Hardware("cuda", 70 * GIB, 32, has_triton=False)
    assert Hardware.least([H200, other]) == Hardware("cuda", 70 * GIB, 16, has_triton=False)
    with pytest.raises(ValueError, match="of the kinds cpu and cuda"):
        Hardware.least([H200, HOST])


def test_this_machine_is_measured() -> None:
    alone, shared = measure(None, 1), measure(None, 2)
    assert alone.kind == "cpu"
    assert not alone.has_triton
    assert 0 < shared.free < alone.free
    assert 1 <= shared.cores <= alone.cores


def test_a_model_of_equal_layers() -> None:
    whole, quick = open_model(llama(num_hidden_layers=3)), opened(num_hidden_layers=3)
    assert quick == replace(whole, build=quick.build, plan=quick.plan)


@given(
    free=st.integers(1, 400),
    layers=st.integers(1, 80),
    width=st.sampled_from([32, 64, 128]),
    groups=st.sampled_from([1, 2, 4, 8]),
    context=st.integers(8, 200_000),
    ranks=st.sampled_from([1, 2, 4]),
    cores=st.integers(1, 256),
    kind=st.sampled_from(["cpu", "cuda"]),
)
def test_whatever_is_chosen_fits(
    free: int, layers: int, width: int, groups: int, context: int, ranks: int, cores: int, kind: str
) -> None:
    """Or is refused with a remedy."""
    shape = {"hidden_size": width * 8, "intermediate_size": width * 24, "num_attention_heads": 8}
    model = opened(num_hidden_layers=max(layers, ranks), num_key_value_heads=groups, **shape)
    model = replace(model, context=context)
    hardware = Hardware(kind, free * GIB, cores, kind == "cuda")
    given_ranks = Given(ranks=ranks)
    try:
        options = choose(hardware, model, torch.bfloat16, given_ranks).options
    except ValueError:  # as more memory would not be
        hardware = replace(hardware, free=4000 * GIB)
        options = choose(hardware, model, torch.bfloat16, given_ranks).options
    assert options.context is not None
    assert options.widths is not None
    assert options.context <= (options.blocks - 1) * options.block_size
    assert options.context <= model.context
    assert list(options.widths) == sorted(set(options.widths))
    assert options.widths[-1] * options.block_size >= options.context
    assert list(options.batches) == sorted(set(options.batches))
    assert options.chunks[-1] <= model.context
    assert pools(model, options, -(-model.layers // ranks)) < hardware.free
