"""How a model is served: the options of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from .gpt import GptConfig
from .parts import Model, Ways

Source = Path | str | PretrainedConfig | GptConfig | Model
"""A model: a folder, a configuration for random weights, or what `open_model` has made of one."""


@dataclass(frozen=True)
class Options:
    """How a model is served; equal on all ranks.

    Attributes:
        groups: decode batches at a time; one for each rank if None.
        batches: the sizes of decode batches that are compiled, ascending.
        chunks: the lengths of prefill chunks that are compiled, ascending.
        prompt_tokens: the most tokens of all prompts of one prefill, with padding; one prompt if
            None.
        blocks: of each pool, the trash included.
        block_size: tokens in a block, on each rank that shares a sequence.
        context: the longest sequence; that of the model if None.
        widths: the lengths of block tables that are compiled, ascending; a quarter of the context
            and the context if None.
        in_flight: executions of a graph at a time, for each group.
        dtype: of weights and pools.
        kv_float8: whether the pools have keys and values in float8 instead.
        fuse: as `compile` takes it.
        passes: as `compile` takes them.
        seed: of random weights.
        warm: whether a variant has run on padding before it is used.
        first_chunk: the length of the prefill chunk that is compiled first; the longest if None.
        late: whether the engine is ready with its first variants; the others follow while it
            serves, by `CgEngine.improve`. Else all of them are compiled first.
        clamp: whether the graph clamps ids to the vocabulary, beside the checks of the driver.
        debug_bounds: whether it checks ids, positions and blocks; an execution fails otherwise.
        via: the transport of activations and tokens from stage to stage, as `cg.via` takes it.
        draws: whether decode batches with a temperature are taken; without, half as many variants
            are compiled.
        tp: ranks that hold a stage together, each a part of its heads, of its hidden units and of
            the vocabulary.
        ep: times `tp` ranks hold a stage together, each a part of its experts.
        cp: times these ranks hold a stage together, each a part of the keys and values of a
            sequence, and of the tokens of a chunk.
        layers: how many each stage has; if None, `cut` balances them.
        draft_tokens: that are proposed for each row of a batch and verified with it; 0: none ever.
        draft: the model that proposes them; if None, whoever submits work does.
    """

    groups: int | None = None
    batches: tuple[int, ...] = (1, 2, 4, 8)
    chunks: tuple[int, ...] = (32, 128)
    prompt_tokens: int | None = None
    blocks: int = 256
    block_size: int = 16
    context: int | None = None
    widths: tuple[int, ...] | None = None
    in_flight: int = 2
    dtype: torch.dtype = torch.float32
    kv_float8: bool = False
    fuse: str | None = None
    passes: str = ""
    seed: int = 0
    warm: bool = True
    first_chunk: int | None = None
    late: bool = False
    clamp: bool = False
    debug_bounds: bool = False
    via: str = "auto"
    draws: bool = True
    tp: int = 1
    ep: int = 1
    cp: int = 1
    layers: tuple[int, ...] | None = None
    draft_tokens: int = 0
    draft: Source | None = None

    @property
    def ways(self) -> Ways:
        """The ranks that hold a stage."""
        return Ways(self.tp, self.ep, self.cp)

    @property
    def span(self) -> int:
        """The tokens of a block of a sequence, on all ranks that share it."""
        return self.block_size * self.cp
