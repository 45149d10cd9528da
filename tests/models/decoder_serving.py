"""Serve a tiny decoder by the engine of examples/serve, and hold it against `generate`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from examples.serve.engine import Options, start

from ..examples.serve_driver import Driver, Habits, Request
from ..examples.serve_models import generate
from ..sampling import scale
from .decoders import VOCABULARY

OPTIONS = Options(
    groups=1,
    batches=(2,),
    chunks=(8,),
    blocks=24,
    block_size=4,
    context=40,
    widths=(),
    warm=False,
    draws=False,
    late=scale() == 1,
)
"""By default only the variants that requests ask for are compiled; with --slow all."""
COUNT = 6
"""Tokens of each request."""
LENGTHS = (1, 5, 21)
"""Of prompts: the longest is several chunks, and more than the windows of tiny models."""


def spread(model: nn.Module) -> None:
    """Give a model weights that tell tokens well apart."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() > 1:
                parameter.copy_(0.2 * noise)
            else:
                parameter.add_(0.2 * noise)


def generated(model: Any) -> dict[tuple[int, ...], list[int]]:
    """What transformers generates greedily for some prompts, with weights that are spread."""
    model.eval()
    spread(model)
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(2)
    prompts = [
        tuple(torch.randint(3, VOCABULARY, (length,), generator=generator).tolist())
        for length in LENGTHS
    ]
    return {prompt: generate(model, prompt, COUNT) for prompt in prompts}


def generated_without_cache(
    model: Any, prompts: Iterable[tuple[int, ...]]
) -> dict[tuple[int, ...], list[int]]:
    """What transformers generates if it computes all keys and values again for each token."""
    model.generation_config.use_cache = False
    return {prompt: generate(model, prompt, COUNT) for prompt in prompts}


def serve(
    model: Any,
    wanted: Mapping[tuple[int, ...], list[int]],
    folder: Path,
    ranks: int = 1,
    tp: int = 1,
    ep: int = 1,
    cp: int = 1,
) -> None:
    """Serve a model from a folder, and compare tokens with those of `generated`.

    Raises:
        ValueError: the engine refuses the model.
        AssertionError: tokens differ, or a rank has other experts than its own.
    """
    model.save_pretrained(folder)
    requests = [Request(prompt, COUNT) for prompt in wanted]
    with use_world(VirtualWorld(ranks)):
        engine = start(folder, replace(OPTIONS, tp=tp, ep=ep, cp=cp))
        assert engine is not None
        for stage in engine.graphs.stages:
            for part in stage.instances.values():
                _check_experts(part, ep)
        try:
            Driver(engine, Habits(seed=1, chunk=8, companions=2)).run(requests)
        finally:
            engine.close()
    for request in requests:
        assert request.out == wanted[request.prompt], f"other tokens: {request.out}"


def _check_experts(part: nn.Module, ep: int) -> None:
    """A rank has one piece of `ep` of the experts of each layer."""
    for module in part.modules():
        if hasattr(module, "has_gate"):
            for parameter in module.parameters():
                assert len(parameter) * ep == module.num_experts
