"""The engine's job: every rank holds a stage, and rank 0 runs the loop besides.

    python -m cg.launch -n 2 -m examples.serve.ranks --model DIR SOCKET

The front starts it, with the address of the socket that it listens at.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import cg

from . import features as switches
from .engine import CgEngine, Options, start
from .loop import EngineLoop
from .models import source
from .options import add_arguments
from .requests import Limits
from .transports import loop_factory

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
CHUNKS = (32, 128, 512)
KV256 = 256
"""Tokens of a block with `+kv256`, in pools of the same size."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of the job, which the front passes on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], add_help=False)
    add_arguments(parser)
    parser.add_argument("socket", type=Path)
    return parser.parse_args(arguments)


def options(given: argparse.Namespace, features: switches.Features) -> Options:
    """The options of the engine, from those of the job and the switches.

    Raises:
        ValueError: the options contradict one another.
    """
    batches = sizes(BATCHES if given.batches is None else given.batches, given.batch)
    chunks = sizes(CHUNKS if given.chunks is None else given.chunks, given.chunk)
    groups = given.groups if features.groups else 1
    if not features.chunk:
        if given.context is None:
            raise ValueError("-chunk needs --context, for a chunk is as long as that")
        chunks = sizes(CHUNKS, given.context)
    block_size = KV256 if features.kv256 else given.block_size
    blocks = -(-given.blocks * given.block_size // block_size)
    capacity = (blocks - 1) * block_size  # the first is trash
    if given.context is not None and given.context > capacity:
        raise ValueError(
            f"{blocks - 1} blocks of {block_size} tokens hold no sequence of {given.context}: "
            "give more --blocks, or a shorter --context"
        )
    chosen = Options(
        groups=groups,
        batches=batches if features.variants else batches[-1:],
        chunks=chunks if features.variants else chunks[-1:],
        prompt_tokens=given.prompt_tokens,
        # Kernels of devices read no further than a row is long.
        widths=() if torch.accelerator.is_available() else None,
        blocks=blocks,
        block_size=block_size,
        context=given.context or capacity,
        in_flight=max(2, groups or cg.world_size() // given.tp),
        tp=given.tp,
        layers=tuple(given.layers) if given.layers else None,
        dtype=getattr(torch, given.dtype),
        fuse=given.fuse,
        warm=features.warm,
        clamp=features.clamp,
        debug_bounds=features.debug_bounds,
        passes=",".join(
            f"-{name}" for name in ("overlap", "capture") if not getattr(features, name)
        ),
    )
    return chosen if features.variants else replace(chosen, widths=())


def sizes(usual: Sequence[int], most: int) -> tuple[int, ...]:
    """The usual buckets below the largest one, and the largest."""
    return (*sorted({size for size in usual if 0 < size < most}), most)


def count(features: switches.Features, limits: Limits, given: argparse.Namespace) -> None:
    """Count the changes of switches that act on ranks.

    Args:
        given: the options of the job.
    """
    changes = features.changes
    cores = os.cpu_count() or 1
    if not features.thr_cap:
        changes["thr_cap"] = torch.get_num_threads() - max(1, cores // cg.world_size())
    if not features.affinity:
        changes["affinity"] = len(os.sched_getaffinity(0)) - max(1, cores // cg.world_size())
    if not features.groups:
        changes["groups"] = cg.world_size() // given.tp - limits.groups
    if features.kv256:
        changes["kv256"] = limits.block_size - given.block_size
    for name in ("overlap", "capture", "warm"):
        changes[name] = not getattr(features, name)


def main() -> None:
    """Serve until the front has gone."""
    arguments = parse()
    logging.basicConfig(format=f"%(asctime)s rank {cg.rank()} %(message)s", level=logging.WARNING)
    logging.getLogger("serve").setLevel(logging.INFO)
    features = switches.parse(arguments.features)
    with cg.profile(arguments.profile) if arguments.profile else contextlib.nullcontext():
        engine = start(source(arguments.model), options(arguments, features))
        if engine is not None:  # the others have served until now
            with asyncio.Runner(loop_factory=loop_factory(features)) as runner:
                runner.run(serve(engine, features, arguments, arguments.socket))


async def serve(
    engine: CgEngine, features: switches.Features, given: argparse.Namespace, path: Path
) -> None:
    """Serve the front that listens at a path, until it goes."""
    count(features, engine.limits, given)
    try:
        await EngineLoop(engine, features, usual_chunk=given.chunk).run(path)
    finally:
        engine.close()


async def serve_here(given: argparse.Namespace, path: Path) -> None:
    """Serve in the front's process, which plays all ranks."""
    features = switches.parse(given.features)
    engine = start(source(given.model), options(given, features))
    assert engine is not None
    await serve(engine, features, given, path)


if __name__ == "__main__":
    main()
