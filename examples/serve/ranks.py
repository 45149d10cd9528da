"""The engine's job: every rank holds a stage, and rank 0 runs the loop besides.

    python -m cg.launch -n 2 -m examples.serve.ranks --model DIR SOCKET

The front starts it, with the address of the socket that it listens at.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers import AutoConfig, PretrainedConfig

import cg

from . import features as switches
from .defaults import BLOCK, CHUNKS, Choice, Given, Hardware, choose
from .engine import CgEngine, start
from .hardware import rank_hardware
from .loop import EngineLoop
from .lora import read_adapter
from .models import source, tokenizer_folder
from .opening import open_model
from .options import NGRAM, adapters, add_arguments, draft_tokens
from .parts import Model
from .pooling.pooling_job import prepare_pooling, serve_pooling
from .pooling.recipe import GENERATE
from .requests import Limits
from .settings import Options
from .transports import loop_factory

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger("serve")

KV256 = 256
"""Tokens of a block with `+kv256`, in pools of the same size."""
SWITCH = 1e-4
"""Seconds after which a thread that computes in Python lets one go on that waits for its turn.

Kernels of other variants are made by such a thread beside the serving. With Python's own 5 ms a
step would be longer by that much, each time the thread that serves comes back from a wait.
"""


@dataclass(frozen=True)
class Usual:
    """Sizes without the switches that change them."""

    chunk: int
    block_size: int


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of the job, which the front passes on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], add_help=False)
    add_arguments(parser)
    parser.add_argument("socket", type=Path)
    return parser.parse_args(arguments)


def given_sizes(parsed: argparse.Namespace, features: switches.Features) -> Given:
    """The sizes that the options of the job and the switches give.

    Raises:
        FileNotFoundError, ValueError: the options contradict one another; or as `open_model`, of
            the draft.
    """
    if not features.chunk and parsed.context is None:
        raise ValueError("-chunk needs --context, for a chunk is as long as that")
    block_size, blocks = parsed.block_size, parsed.blocks
    if features.kv256:
        if blocks is not None:
            blocks = -(-blocks * (block_size or BLOCK["cpu"]) // KV256)
        block_size = KV256
    return Given(
        ranks=cg.world_size(),
        tp=parsed.tp,
        ep=parsed.ep,
        cp=parsed.cp,
        groups=parsed.groups if features.groups else 1,
        layers=tuple(parsed.layers) if parsed.layers else None,
        dtype=parsed.dtype,
        kv_float8=parsed.kv_dtype == "fp8",
        fuse=parsed.fuse,
        memory=parsed.memory,
        blocks=blocks,
        block_size=block_size,
        context=parsed.context,
        batch=parsed.batch,
        batches=None if parsed.batches is None else tuple(parsed.batches),
        chunk=parsed.chunk if features.chunk else parsed.context,
        chunks=None if parsed.chunks is None else tuple(parsed.chunks),
        prompt_tokens=parsed.prompt_tokens,
        draft_tokens=draft_tokens(parsed),
        draft=None if parsed.draft in (None, NGRAM) else open_model(source(parsed.draft)),
    )


def options(chosen: Options, parsed: argparse.Namespace, features: switches.Features) -> Options:
    """The options of the engine, from those that are chosen and the switches."""
    passes = [f"-{name}" for name in ("overlap", "capture") if not getattr(features, name)]
    chosen = replace(
        chosen,
        warm=features.warm,
        late=not parsed.ahead,
        clamp=features.clamp,
        debug_bounds=features.debug_bounds,
        passes=",".join(passes),
    )
    if features.variants:
        return chosen
    batches, chunks = chosen.batches[-1:], chosen.chunks[-1:]
    return replace(chosen, batches=batches, chunks=chunks, widths=())


def chosen(
    parsed: argparse.Namespace, features: switches.Features
) -> tuple[Model, Choice, Hardware]:
    """The model, and the options for it that suit what all ranks have; collective.

    Raises:
        FileNotFoundError, ValueError: as `open_model` and `choose`.
    """
    model_source = source(parsed.model)
    folders = adapters(parsed).values()
    model = open_model(model_source, adapters=[read_adapter(folder) for folder in folders])
    hardware = rank_hardware()
    sizes = given_sizes(parsed, features)
    return model, choose(hardware, model, stored_dtype(model_source), sizes), hardware


def stored_dtype(model_source: Any) -> torch.dtype:
    """The dtype that the configuration of a model names; float32 if it names none."""
    config = model_source
    if isinstance(config, Path) and (config / "config.json").exists():
        config = AutoConfig.from_pretrained(config)
    dtype = config.dtype if isinstance(config, PretrainedConfig) else None
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def prepare(
    parsed: argparse.Namespace, features: switches.Features
) -> tuple[CgEngine | None, Usual]:
    """Start the engine with the options of a job; collective."""
    model, choice, hardware = chosen(parsed, features)
    if cg.rank() == 0:
        for line in choice.reasons:
            log.info("%s", line)
    usual = Usual(
        parsed.chunk or CHUNKS[hardware.place][-1], parsed.block_size or BLOCK[hardware.place]
    )
    return start(model, options(choice.options, parsed, features)), usual


def count(
    features: switches.Features, limits: Limits, parsed: argparse.Namespace, usual: Usual
) -> None:
    """Count the changes of switches that act on ranks.

    Args:
        parsed: the options of the job.
    """
    changes = features.changes
    cores = os.cpu_count() or 1
    if not features.thr_cap:
        changes["thr_cap"] = torch.get_num_threads() - max(1, cores // cg.world_size())
    if not features.affinity:
        changes["affinity"] = len(os.sched_getaffinity(0)) - max(1, cores // cg.world_size())
    if not features.groups:
        changes["groups"] = cg.world_size() // (parsed.tp * parsed.ep * parsed.cp) - limits.groups
    if features.kv256:
        changes["kv256"] = limits.block_size // parsed.cp - usual.block_size
    for name in ("overlap", "capture", "warm"):
        changes[name] = not getattr(features, name)


def main() -> None:
    """Serve until the front has gone."""
    sys.setswitchinterval(SWITCH)
    arguments = parse()
    logging.basicConfig(format=f"%(asctime)s rank {cg.rank()} %(message)s", level=logging.WARNING)
    log.setLevel(logging.INFO)
    features = switches.parse(arguments.features)
    with cg.profile(arguments.profile) if arguments.profile else contextlib.nullcontext():
        if arguments.task != GENERATE:
            pooling_engine = prepare_pooling(arguments, stored_dtype(Path(arguments.model)))
            if pooling_engine is not None:
                asyncio.run(serve_pooling(pooling_engine, arguments.socket))
            leave()
        engine, usual = prepare(arguments, features)
        if engine is not None:  # the others have served until now
            with asyncio.Runner(loop_factory=loop_factory(features)) as runner:
                runner.run(serve(engine, features, arguments, usual, arguments.socket))
    leave()


def leave() -> NoReturn:
    """End this process, which has done all: taking torch's modules apart would take a second."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def serve(
    engine: CgEngine,
    features: switches.Features,
    parsed: argparse.Namespace,
    usual: Usual,
    path: Path,
) -> None:
    """Serve the front that listens at a path, until it goes."""
    count(features, engine.limits, parsed, usual)

    def tokens() -> LLTokenizer:
        from .structure.vocabulary import stored, vocabulary  # llguidance is for grammars alone

        tokenizer, limits = stored(tokenizer_folder(parsed.model)), engine.limits
        return vocabulary(tokenizer, limits.vocabulary, limits.eos)

    try:
        loop = EngineLoop(engine, features, usual_chunk=usual.chunk, vocabulary=tokens)
        await loop.run(path)
    finally:
        engine.close()


async def serve_here(parsed: argparse.Namespace, path: Path) -> None:
    """Serve in the front's process, which plays all ranks."""
    sys.setswitchinterval(SWITCH)
    features = switches.parse(parsed.features)
    engine, usual = prepare(parsed, features)
    assert engine is not None
    await serve(engine, features, parsed, usual, path)


if __name__ == "__main__":
    main()
