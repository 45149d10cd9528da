"""Sizes of an engine that nobody gives: by the device, what is free there, and the model.

`choose` is a function of numbers, so that it can be tried for machines that are not there. What
ranks have measured is brought together first (`Hardware.least`), so all of them choose alike.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .checks import check_float8, check_ranks
from .model import split
from .parts import Model, Ways
from .sampling.records import RecordLayout
from .settings import Options

GIB = 1 << 30
HOSTS = ("cpu", "fake")
"""Kinds of devices whose memory and cores are the host's."""
STARTS = {"cpu": 16 << 20, "accelerator": 192 << 20}
"""Bytes that a device reads in the time that a layer takes besides reading its weights.

With 8 rows a layer of SmolLM2-135M takes 3.2 ms of a core, and its head of 113 MB takes 10 ms. A
layer of Qwen2.5-0.5B takes 66 us of an H100, in a recorded step, and its 30 MB take 9 us of these.
"""
SHARES = {"cpu": 0.25, "accelerator": 0.9}
"""Of the memory that is free beside the weights, the part that the pools may have."""
BATCHES = {
    "cpu": (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384),
    "accelerator": (8, 32, 64, 128, 256),
}
"""Sizes of decode batches: a device takes as long for one row as for a few."""
CHUNKS = {"cpu": (32, 128, 512), "accelerator": (64, 256, 1024)}
"""Lengths of prefill chunks."""
FIRST_CHUNK = 128
"""The chunk that is compiled first on a host, where a long one takes a second."""
BLOCK = {"cpu": 16, "accelerator": 64}
"""Tokens of a block: on a device tables are copied for each step, so they are short."""
ROWS_OF_A_CORE, FEWEST_ROWS, MOST_ROWS = 4, 8, 64
"""Rows of a decode batch on a host."""
PROMPTS = (16, 4, 1)
"""Numbers of prompts of a prefill on a device; what they need is at most `BESIDE` of the room."""
BESIDE = 0.05
TOKENS_OF_A_REQUEST = 512
"""The least tokens for which the pools have room, for each request at a time."""
TABLES = {"cpu": 512, "accelerator": 4096}
"""Tokens of the shortest tables; each longer kind holds four times as many."""
LOGIT = 40
"""Bytes beside each logit while a token is drawn: float32 and int64, sorted, summed, and hashed."""
PART, LEAST = 256, 16
"""Entries of a pool for which one program of attention has partial sums, and its fewest heads."""
BEYOND = 1 << 17
"""The longest sequence of a model that keeps no keys, so that no memory bounds it."""
INDEXED = (1 << 31) - 1
"""The most elements of a pool: kernels count them by 32 bits, which is faster."""


@dataclass(frozen=True)
class Hardware:
    """The device, the memory and the cores of a rank.

    Attributes:
        kind: of its device; `cpu` without one.
        free: bytes that are free on the device, or the rank's share of what is free on its host.
        cores: the rank's share of those of its machine.
        has_triton: whether kernels can be compiled for the device.
    """

    kind: str
    free: int
    cores: int
    has_triton: bool

    @property
    def place(self) -> str:
        """`cpu` or `accelerator`, by which sizes are chosen."""
        return "cpu" if self.kind in HOSTS else "accelerator"

    @staticmethod
    def least(measured: Sequence[Hardware]) -> Hardware:
        """The hardware that each of some ranks has at least.

        Raises:
            ValueError: their devices are not of one kind.
        """
        kinds = sorted({rank_hardware.kind for rank_hardware in measured})
        if len(kinds) > 1:
            raise ValueError(
                f"ranks have devices of the kinds {' and '.join(kinds)}: give --dtype, --blocks "
                "and --batch, or start ranks that are alike"
            )
        return Hardware(
            kinds[0],
            min(rank_hardware.free for rank_hardware in measured),
            min(rank_hardware.cores for rank_hardware in measured),
            all(rank_hardware.has_triton for rank_hardware in measured),
        )


def measure(device: torch.device | None, ranks: int) -> Hardware:
    """Measure the hardware of this rank.

    Args:
        device: of the rank; None without one.
        ranks: of its machine.
    """
    cores = max(1, (os.cpu_count() or 1) // ranks)
    if device is None or device.type in HOSTS:
        return Hardware(
            "cpu" if device is None else device.type, _free_host() // ranks, cores, False
        )
    free, _ = torch.accelerator.memory.get_memory_info(device)
    has_triton = importlib.util.find_spec("triton") is not None
    return Hardware(device.type, free, cores, has_triton)


def _free_host() -> int:
    """Bytes that programs can still have on this machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("MemAvailable:"))
    return int(line.split()[1]) << 10


@dataclass(frozen=True)
class Given:
    """The sizes that are given by hand; None for those that are to be chosen."""

    ranks: int = 1
    tp: int = 1
    ep: int = 1
    cp: int = 1
    groups: int | None = None
    layers: tuple[int, ...] | None = None
    dtype: str | None = None
    kv_float8: bool = False
    fuse: str | None = None  # "none" for no compiler
    memory: float | None = None
    blocks: int | None = None
    block_size: int | None = None
    context: int | None = None
    batch: int | None = None
    batches: tuple[int, ...] | None = None
    chunk: int | None = None
    chunks: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    draft_tokens: int = 0
    draft: Model | None = None

    @property
    def ways(self) -> Ways:
        """The ranks that hold a stage."""
        return Ways(self.tp, self.ep, self.cp)

    @property
    def stages(self) -> int:
        """The number of stages that the ranks hold."""
        return self.ranks // self.ways.ranks


@dataclass(frozen=True)
class Choice:
    """The options of an engine, and a line on each of them."""

    options: Options
    reasons: tuple[str, ...]


def choose(hardware: Hardware, model: Model, stored: torch.dtype, by_hand: Given) -> Choice:
    """Choose what is not given.

    Args:
        hardware: what each rank has, before there are weights.
        model: to serve.
        stored: the dtype that its configuration names.
        by_hand: what is given by hand.

    Raises:
        ValueError: there is no room for the model, or for a sequence; or as `check_ranks`.
    """
    check_ranks(model, by_hand.ranks, by_hand.ways)
    check_float8(model, by_hand.draft, by_hand.kv_float8)
    place = hardware.place
    stages = by_hand.stages
    context = min(model.context, by_hand.context or (model.context if model.entry else BEYOND))
    # Without keys there is nothing to share out, so a sequence has one block.
    block_size = by_hand.block_size or (BLOCK[place] if model.entry else context)
    dtype, why_dtype = _dtype(place, stored, by_hand)
    fuse, why_fuse = _fuse(hardware, by_hand)
    chunk = by_hand.chunk or min(CHUNKS[place][-1], model.context)
    options = Options(
        groups=by_hand.groups,
        tp=by_hand.tp,
        ep=by_hand.ep,
        cp=by_hand.cp,
        layers=by_hand.layers,
        dtype=dtype,
        kv_float8=by_hand.kv_float8,
        fuse=fuse,
        block_size=block_size,
        batches=sizes(
            BATCHES[place] if by_hand.batches is None else by_hand.batches, _rows(hardware, by_hand)
        ),
        chunks=sizes(CHUNKS[place] if by_hand.chunks is None else by_hand.chunks, chunk),
        first_chunk=FIRST_CHUNK if place == "cpu" else None,
        context=context,
        in_flight=max(2, by_hand.groups or stages),
        late=True,
        draft_tokens=by_hand.draft_tokens,
        draft=by_hand.draft,
    )
    options = replace(options, prompt_tokens=_prompt_tokens(hardware, model, options, by_hand))
    options, why_blocks = _with_blocks(hardware, model, options, by_hand)
    options = _within_pools(options, by_hand)
    groups = by_hand.groups or stages
    many = (options.prompt_tokens or chunk) // options.chunks[-1]
    return Choice(
        options,
        (
            f"{_name(dtype)}, {why_dtype}; {why_fuse}",
            *(("keys and values in float8, as is given",) if by_hand.kv_float8 else ()),
            why_blocks,
            f"{groups * options.batches[-1]} requests at a time, {_why_rows(hardware, by_hand)}: "
            f"batches of {_listed(options.batches)}, groups: {groups}, ranks: {by_hand.ranks}",
            f"prompts in chunks of {_listed(options.chunks)} tokens, at most {many} at once",
            f"sequences of at most {options.context} tokens, "
            f"{_why_context(model, options, by_hand)}",
            *_draft(by_hand),
        ),
    )


def sizes(usual: Sequence[int], most: int) -> tuple[int, ...]:
    """The usual sizes below the largest one, and the largest."""
    return (*sorted({size for size in usual if 0 < size < most}), most)


def balanced(model: Model, stages: int, dtype: torch.dtype, on_host: bool) -> tuple[int, ...]:
    """The layers of each stage, by a cut that balances decode steps.

    A step reads all weights, so a layer takes the time to read its own and that to start its
    operators. The last stage reads the head as well, which may be as large as many layers.
    """
    layer = model.layer_bytes(dtype) + STARTS["cpu" if on_host else "accelerator"]
    head = model.hidden * model.vocabulary * dtype.itemsize / layer
    return tuple(split(model.layers, stages, head))


# -- one choice each -------------------------------------------------------------------------------


def _dtype(place: str, stored: torch.dtype, by_hand: Given) -> tuple[torch.dtype, str]:
    if by_hand.dtype is not None:
        return getattr(torch, by_hand.dtype), "as is given"
    if place == "cpu":
        return torch.float32, "which hosts compute fastest"
    if stored in (torch.bfloat16, torch.float16):
        return stored, "as the checkpoint has it"
    return torch.float32, "as the checkpoint has no shorter one"


def _fuse(hardware: Hardware, by_hand: Given) -> tuple[str | None, str]:
    if by_hand.fuse is not None:
        fuse = None if by_hand.fuse == "none" else by_hand.fuse
        return fuse, f"fused by {fuse}, as is given" if fuse else "not fused, as is given"
    if hardware.has_triton:
        return "inductor", "fused by inductor, for Triton is there"
    return None, "not fused, for there is no Triton"


def _rows(hardware: Hardware, by_hand: Given) -> int:
    """The largest decode batch of a group, if memory suffices."""
    if by_hand.batch is not None:
        return by_hand.batch
    if hardware.place == "cpu":
        return min(MOST_ROWS, max(FEWEST_ROWS, ROWS_OF_A_CORE * hardware.cores))
    return BATCHES["accelerator"][-1]


def _why_rows(hardware: Hardware, by_hand: Given) -> str:
    if by_hand.batch is not None:
        return "as is given"
    if hardware.place == "cpu":
        return f"by cores, of which each rank has {hardware.cores}"
    return f"as a {hardware.kind} device takes them"


def _prompt_tokens(
    hardware: Hardware, model: Model, options: Options, by_hand: Given
) -> int | None:
    if by_hand.prompt_tokens is not None or hardware.place == "cpu":
        return by_hand.prompt_tokens
    room = hardware.free * BESIDE
    chunk = options.chunks[-1]
    fitting = (n for n in PROMPTS if n * chunk * _activations(model, options) <= room)
    return chunk * next(fitting, 1)


def _activations(model: Model, options: Options) -> int:
    """Bytes of what a layer makes of a token: twice its widest values."""
    return 2 * model.layer // model.hidden * options.dtype.itemsize // options.tp


def _scratch(model: Model, options: Options, stages: int) -> int:
    """Bytes of a device beside weights and pools: for logits, records, prompts, and attention."""
    rows, positions, tp = options.batches[-1], 1 + options.draft_tokens, options.tp
    logits = rows * positions * model.vocabulary * LOGIT
    prompts = (options.prompt_tokens or options.chunks[-1]) * _activations(model, options)
    parts = -(-(options.context or model.context) // (PART * options.cp))
    lanes = max(LEAST, 1 << (model.width - 1).bit_length())
    heads = max(LEAST, 1 << (positions * model.heads // model.groups - 1).bit_length())
    sums = options.in_flight * rows * model.groups // tp * parts * heads * (lanes + 2) * 4
    return logits + prompts + sums + _records(model, options, stages)


def _records(model: Model, options: Options, stages: int) -> int:
    """Bytes of what the last stage keeps of requests whose logits are adjusted."""
    numbers = model.vocabulary + RecordLayout(model.vocabulary).width
    return (options.groups or stages) * options.batches[-1] * numbers * 4


def _with_blocks(
    hardware: Hardware, model: Model, options: Options, by_hand: Given
) -> tuple[Options, str]:
    """The options with as many blocks as each stage has room for, and why."""
    place, size = hardware.place, options.block_size
    stages = by_hand.stages
    if by_hand.blocks is not None:
        why = f"{by_hand.blocks} blocks of {_tokens(options)}, as is given"
        return replace(options, blocks=by_hand.blocks), why
    layers = by_hand.layers or balanced(model, stages, options.dtype, place == "cpu")
    share = SHARES[place] if by_hand.memory is None else by_hand.memory
    scratch = _scratch(model, options, stages) if place != "cpu" else 0
    requests = (by_hand.groups or stages) * options.batches[-1]
    used = requests * -(-(options.context or 0) // options.span)
    fits = []
    for stage, count in enumerate(layers):
        weights = _weights(model, count, stage == 0, stage == stages - 1, options)
        entries = count * _entry(model, options)
        if stage == 0 and by_hand.draft is not None:
            # It lies on one rank, whole, however many share a stage.
            own, draft = replace(options, tp=1, ep=1), by_hand.draft
            weights += _weights(draft, draft.layers, True, True, own)
            entries += draft.layers * _entry(draft, own) * options.cp
        states = count * model.state * (1 + requests)
        room = int((hardware.free - weights) * share) - scratch - states
        fits.append((room // (entries * size) if entries else min(room, 1 + used), weights, room))
    blocks, weights, room = min(fits)
    of_draft = 0 if by_hand.draft is None else by_hand.draft.entry * options.cp
    widest = max(model.entry // by_hand.tp, of_draft)
    most = INDEXED // (size * max(1, widest))
    blocks = min(blocks, most, 1 + used) if place == "cpu" else min(blocks, most)
    if blocks < 2:
        raise ValueError(
            f"{hardware.free / GIB:.1f} GiB are free for a rank, and its weights take "
            f"{weights / GIB:.1f}: that leaves no room for what layers keep. Give a larger "
            "--memory, fewer requests (--batch), or more ranks"
        )
    why = (
        f"{blocks} blocks of {_tokens(options)}: of {hardware.free / GIB:.1f} GiB that are free "
        f"for a rank, weights take {weights / GIB:.1f}, and the pools may have {room / GIB:.1f}"
    )
    return replace(options, blocks=blocks), why


def _tokens(options: Options) -> str:
    """The tokens of a block, in words."""
    ranks = f" on each of {options.cp} ranks" if options.cp > 1 else ""
    return f"{options.block_size} tokens{ranks}"


def _entry(model: Model, options: Options) -> int:
    """Bytes of a token's keys and values in the largest layer, on one rank."""
    if options.kv_float8:  # a byte each, and one for the scale of each key and value
        return (model.entry + 2 * model.most_groups) // options.tp
    return model.entry // options.tp * options.dtype.itemsize


def _weights(model: Model, layers: int, is_first: bool, is_last: bool, options: Options) -> int:
    """Bytes of a stage's weights, on one rank; a head that is the embedding counts twice."""
    size = options.dtype.itemsize
    ends = (is_first + is_last) * model.hidden * model.vocabulary * size
    experts = 0 if model.experts is None else layers * model.experts.bytes(options.dtype)
    cut = layers * model.layer_bytes(options.dtype) - experts + ends
    return cut // options.tp + experts // options.ep


def _within_pools(options: Options, by_hand: Given) -> Options:
    """The options with a context that the pools hold, requests that have room, and tables.

    Raises:
        ValueError: the given context is longer than the pools.
    """
    capacity = (options.blocks - 1) * options.span  # the first is trash
    context = min(options.context or capacity, capacity)
    if by_hand.context is not None and by_hand.context > capacity:
        raise ValueError(
            f"{options.blocks - 1} blocks of {_tokens(options)} hold no sequence of "
            f"{by_hand.context}: give more --blocks, or a shorter --context"
        )
    batches = options.batches
    if by_hand.batch is None:
        groups = by_hand.groups or by_hand.stages
        most = max(1, capacity // (min(TOKENS_OF_A_REQUEST, context) * groups))
        batches = sizes(batches, min(batches[-1], most))
    return replace(options, context=context, batches=batches, widths=_tables(options, context))


def _tables(options: Options, context: int) -> tuple[int, ...]:
    """The lengths of block tables, each four times as long as the one before, in blocks."""
    first = TABLES["cpu" if options.first_chunk is not None else "accelerator"]
    lengths = itertools.takewhile(
        lambda n: n < context, (first << 2 * i for i in itertools.count())
    )
    whole = -(-context // options.span)
    return tuple(sorted({*(max(1, n // options.span) for n in lengths), whole}))


def _why_context(model: Model, options: Options, by_hand: Given) -> str:
    if options.context == by_hand.context:
        return "as is given"
    return "as the model takes" if options.context == model.context else "as the pools hold"


def _draft(by_hand: Given) -> tuple[str, ...]:
    if not by_hand.draft_tokens:
        return ()
    by = "the text itself" if by_hand.draft is None else "a draft on the first rank"
    return (f"{by_hand.draft_tokens} tokens at a time are proposed by {by}",)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
