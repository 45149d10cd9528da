"""The most that a rank holds while it reads its part of a model, and the bytes that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import cg
from cg.tracer.function.groups.meta import fill_from
from cg.tracer.values.actor_state import collect
from cg.tracer.values.pieces import lay_out

from .families import model_of

pytestmark = pytest.mark.timeout(300)

CLEAR = Path("/proc/self/clear_refs")
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "vocab_size": 8192,
    "num_key_value_heads": 4,
}
SLACK = 12 << 20
"""Bytes for what else a process allocates."""


def memory(field: str) -> int:
    """Bytes of this process, by a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("large")
    model_of("Llama", 8, **SIZES).save_pretrained(found)
    return found


@pytest.mark.skipif(not CLEAR.exists(), reason="the kernel does not reset peaks of memory")
@pytest.mark.parametrize("ranks", [1, 4], ids=["a stage", "a piece of a stage"])
def test_a_model_is_never_whole_on_a_rank(folder: Path, ranks: int) -> None:
    with cg.empty_weights():
        model = model_of("Llama", 8, **SIZES)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    cuts, weights = cg.cut_layers(model, 4), cg.pretrained(folder)
    part = cuts.part(1)
    grid = cg.mesh(tp=ranks)
    plan = cg.plans.hf(model, batch=None) if ranks > 1 else cg.plan({})
    logical = {each.path: each for each in lay_out(part, plan, cg.whole, grid)}
    CLEAR.write_text("5")
    before = memory("VmRSS")
    fill_from(weights, part, logical, grid.position(ranks - 1), "part")
    grown = memory("VmHWM") - before
    held = sum(p.numel() * p.element_size() for p in part.parameters())
    assert held <= cuts[1].bytes * (0.3 if ranks > 1 else 1)
    largest = 4 * 512 * 1408
    assert grown < held + 2 * largest + SLACK < whole / 2


def test_a_piece_is_that_of_the_tensor(folder: Path) -> None:
    found: Any = model_of("Llama", 8, **SIZES)
    with cg.empty_weights():
        model = model_of("Llama", 8, **SIZES)
    part = cg.cut_layers(model, 4).part(3)
    grid = cg.mesh(tp=4)
    plan = cg.plans.hf(model, batch=None)
    logical = {each.path: each for each in lay_out(part, plan, cg.whole, grid)}
    fill_from(cg.pretrained(folder), part, logical, grid.position(2), "part")
    head = found.lm_head.weight[4096:6144]
    assert torch.equal(part.model.lm_head.weight, head)
    down = found.model.layers[7].mlp.down_proj.weight[:, 704:1056]
    assert torch.equal(part.model.model.layers[7].mlp.down_proj.weight, down)
    assert not any(each.tensor.is_meta for each in collect(part).tensors)
