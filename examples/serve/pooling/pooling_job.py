"""The job of a server whose model pools: sizes that are chosen, the engine, and its loop."""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer

import cg

from ..defaults import Hardware
from ..hardware import rank_hardware
from ..settings import Options
from .encoders import UNBOUNDED, Encoder, open_encoder
from .packing import lengths, row_counts
from .pooling_engine import CgPoolingEngine, start_pooling
from .pooling_loop import PoolingLoop
from .recipe import SCORE, recipe_of

log = logging.getLogger("serve")

BUDGETS = {"cpu": 512, "accelerator": 16384}
"""Tokens of a batch with padding, unless a number is given: more take longer, and gain nothing."""
FIRST = 128
"""The length of the texts of the first variant."""


def choose_sizes(
    hardware: Hardware, model: Encoder, stored: torch.dtype, given: argparse.Namespace
) -> Options:
    """The options of an engine: what is given, and else what suits the device.

    Args:
        stored: the dtype that the configuration of the model names.
        given: the options of the job.

    Raises:
        ValueError: no length is known, or the given one is longer than the model's.
    """
    context = given.context or model.context
    if context > model.context:
        raise ValueError(f"--context {context}, and the model takes {model.context} tokens")
    if context == UNBOUNDED:
        raise ValueError("config.json does not say how long a text may be: give --context")
    on_host = hardware.place == "cpu"
    budget = given.prompt_tokens or BUDGETS[hardware.place]
    chunks = lengths(context)
    dtype = getattr(torch, given.dtype) if given.dtype else stored
    if not given.dtype and (on_host or dtype not in (torch.bfloat16, torch.float16)):
        dtype = torch.float32
    fuse = given.fuse or ("inductor" if hardware.has_triton else "none")
    return Options(
        tp=given.tp,
        ep=given.ep,
        cp=given.cp,
        layers=tuple(given.layers) if given.layers else None,
        dtype=dtype,
        fuse=None if fuse == "none" else fuse,
        batches=tuple(row_counts(budget, chunks[0], given.batch)),
        chunks=chunks,
        first_chunk=FIRST,
        prompt_tokens=budget,
        context=context,
        in_flight=1 + cg.world_size() // max(1, given.tp),
        late=not given.ahead,
    )


def prepare_pooling(given: argparse.Namespace, stored: torch.dtype) -> CgPoolingEngine | None:
    """Start the engine with the options of a job; collective.

    Args:
        stored: the dtype that the configuration of the model names.

    Raises:
        FileNotFoundError, ValueError: the folder, or an option, is not served.
    """
    folder = Path(given.model)
    recipe = recipe_of(folder, given.task, given.pooling, given.dimensions)
    if recipe.task == SCORE:
        names = AutoTokenizer.from_pretrained(folder).model_input_names
        recipe = replace(recipe, has_types="token_type_ids" in names)
    model = open_encoder(folder, recipe)
    options = choose_sizes(rank_hardware(), model, stored, given)
    engine = start_pooling(model, options)
    if engine is not None:
        name = str(options.dtype).removeprefix("torch.")
        by = engine.graphs.pooling or "its own head"
        log.info(
            "%s; texts of at most %d tokens, %d tokens of a batch; pooled by %s to %d numbers",
            *(name, options.context, options.prompt_tokens, by, model.width),
        )
    return engine


async def serve_pooling(engine: CgPoolingEngine, path: Path) -> None:
    """Serve the front that listens at a path, until it goes."""
    try:
        await PoolingLoop(engine, in_flight=engine.in_flight).run(path)
    finally:
        engine.close()
