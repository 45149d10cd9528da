"""Transfers between random layouts, as ranks of the virtual world run them, against numpy."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from cg.backends.virtual.world import VirtualExecutable
from cg.ir.phases import Phase
from cg.passes.base import Pipeline
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline
from cg.passes.manager.registry import parse_pipeline

from ..passes.random_transfers import (
    Types,
    as_module,
    check,
    initial,
    inputs_of,
    is_valid,
    ranks_of,
    summands,
    transfers,
)
from ..sampling import examples

PIPELINES = (
    default_pipeline(),
    parse_pipeline("insert-transfers,lower-transfers,split-transfers,schedule,plan-buffers"),
)


@examples(500, shrinks=True)
@given(
    types=transfers(),
    seed=st.integers(0, 99),
    pipeline=st.sampled_from(PIPELINES),
    shuffle=st.none() | st.integers(0, 99),
)
def test_each_rank_has_its_part(
    types: Types, seed: int, pipeline: Pipeline, shuffle: int | None
) -> None:
    assume(is_valid(types))
    source, target = types
    module = as_module(types, Phase.TRACED)
    PassManager(pipeline).run(module)
    held = initial(source, seed, whole_numbers=bool(summands(target)))
    found = {}

    def take(value: torch.Tensor, rank: torch.Tensor) -> list[None]:
        found[int(rank)] = value.numpy().copy()
        return [None]

    inputs = [
        [torch.from_numpy(np.array(value)) for value in inputs_of(types, held, rank)]
        for rank in range(module.world)
    ]
    VirtualExecutable(module, {"take": take}, {}, poison=True, shuffle=shuffle).run(inputs)
    assert found.keys() == set(ranks_of(target))
    check(types, held, found)
