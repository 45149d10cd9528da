"""Decoders whose tokens are cut between tensor parallel layers, and mixtures with cut tokens."""

from __future__ import annotations

import math
from collections import Counter

import pytest

import cg
from cg.ir.ops import Collective

pytest.importorskip("transformers")

from ..worlds import virtual_world
from .cut_tokens import FAMILIES, Shape, compiled, decoder, hold_against_one_process

SLOW = pytest.mark.slow
IN_FLOAT32 = ("gemma", "mixtral", "qwen2_moe")
"""Families whose norms or routers compute in float32, whatever the model is in."""

_world = virtual_world(8, threads=1)


@pytest.mark.parametrize(
    "family", [name if name == "gpt2" else pytest.param(name, marks=SLOW) for name in FAMILIES]
)
def test_families(family: str) -> None:
    tolerance = 1e-7 if family in IN_FLOAT32 else 1e-10
    hold_against_one_process(family, Shape({"tp": 2}, length=7), tolerance)


SHAPES = {
    "pipeline": ("llama", Shape({"tp": 2}, stages=2, length=5, schedule="zb-h1")),
    "lent": ("llama", Shape({"tp": 2}, stages=2, lent=cg.cut(0, "tp"))),
    "rows": ("llama", Shape({"dp": 2, "tp": 2}, length=5)),
    "stored": ("qwen2", Shape({"dp": 2, "tp": 2}, store=("dp",))),
    "four ranks": ("neox", Shape({"tp": 4}, length=7)),
    "one token": ("llama", Shape({"tp": 2}, length=1)),
    "zigzag": ("mistral", Shape({"cp": 2, "tp": 2}, ("cp", "tp"), length=9, order="zigzag")),
    "all": ("llama", Shape({"dp": 2, "cp": 2, "tp": 2}, ("cp", "tp"), length=8)),
    "experts, rows": ("qwen2_moe", Shape({"dp": 2, "tp": 2}, length=5)),
    "experts, tokens": ("qwen2_moe", Shape({"dp": 2, "ep": 2, "cp": 2, "tp": 1}, ("cp",))),
    "experts, weights": ("mixtral", Shape({"ep": 2, "tp": 2})),
    "experts, all": ("mixtral", Shape({"ep": 2, "cp": 2, "tp": 2}, ("cp", "tp"), length=7)),
}
DEFAULT = ("pipeline", "all", "experts, tokens")


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=SLOW) for name in SHAPES]
)
def test_shapes(name: str) -> None:
    family, shape = SHAPES[name]
    hold_against_one_process(family, shape, 1e-7 if family in IN_FLOAT32 else 1e-10)


def test_bytes_and_memory() -> None:
    """An all-gather and a reduce-scatter stand for an all-reduce; a rank saves its own tokens."""
    rows, length, width = 4, 64, 16
    value = rows * length * width
    saved, sent = {}, {}
    for sequence in ((), ("tp",)):
        _, step = compiled(decoder("qwen3"), Shape({"tp": 2}, sequence, length=length))
        saved[sequence] = step.memory_analysis()[0].saved
        sent[sequence] = Counter[str]()
        for op in step.module.program_of(0).ops:
            if isinstance(op, Collective) and op.mb == 0:
                size = math.prod(op.operands[0].type.shape)
                if size >= value // 2:
                    sent[sequence][op.opcode] += 2 * size // value
    # Of two layers and the embedding or the head: two of a rank's tokens are a whole value.
    assert sent[()] == {"all_reduce": 2 * (5 + 5)}
    assert sent["tp",] == {"reduce_scatter": 2 * (5 + 5), "all_gather": 5 + 5 + 5}
    cut_values = 2 * 2 + 1  # the input of each norm
    assert saved[()] - saved["tp",] >= 2 * cut_values * value * 8 // 2, "of two microbatches"
