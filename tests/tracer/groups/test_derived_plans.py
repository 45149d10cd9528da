"""Plans that are derived from a model's traced forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import cg
from cg.tracer.values.mesh import mesh
from cg.tracer.values.pieces import lay_out

WIDTH, HEADS, HEAD = 16, 4, 4


class Block(nn.Module):
    """Attention of grouped queries with a fused projection, and an MLP whose gate is packed.

    Args:
        keys: heads of keys, and of values.
        is_grouped: whether the fused rows are ordered by heads of keys, or queries come first.
    """

    def __init__(self, keys: int, is_grouped: bool) -> None:
        super().__init__()
        self.keys, self.is_grouped = keys, is_grouped
        self.norm = nn.LayerNorm(WIDTH)
        self.fused = nn.Linear(WIDTH, (HEADS + 2 * keys) * HEAD)
        self.out = nn.Linear(HEADS * HEAD, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH)
        self.lonely = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self._attend(self.fused(self.norm(x))))
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(torch.relu(gate) * up) + self.lonely(x)

    def _attend(self, fused: torch.Tensor) -> torch.Tensor:
        rows, length, _ = fused.shape
        each = HEADS // self.keys
        if self.is_grouped:
            heads = fused.view(rows, length, self.keys, each + 2, HEAD)
            q, k, v = heads.split([each, 1, 1], dim=3)
            q = q.reshape(rows, length, HEADS, HEAD)
            k, v = k.squeeze(3), v.squeeze(3)
        else:
            sizes = [HEADS * HEAD, self.keys * HEAD, self.keys * HEAD]
            q, k, v = (part.unflatten(-1, (-1, HEAD)) for part in fused.split(sizes, dim=-1))
        k, v = (part.repeat_interleave(each, dim=2) for part in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", scores, v).reshape(rows, length, -1)


class Decoder(nn.Module):
    def __init__(self, keys: int, is_grouped: bool, vocabulary: int = 31, tied: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(Block(keys, is_grouped) for _ in range(2))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


IDS = torch.randint(31, (4, 6), generator=torch.Generator().manual_seed(0))


def derived(model: nn.Module, **options: Any) -> Any:
    return cg.plans.derived(model, batch=None, example={"ids": IDS}, **options)


def cuts_of(plan: Any) -> dict[str, str]:
    return {pattern.removeprefix("*layers.*."): str(sharding) for pattern, sharding in plan.items}


VOCABULARY = {"*head.weight": 'cg.cut(0, "tp")', "*embed.weight": 'cg.cut(0, "tp")'}
MLP = {
    "gate_up.weight": 'cg.cut(0, "tp", blocks=2)',
    "gate_up.bias": 'cg.cut(0, "tp", blocks=2)',
    "down.weight": 'cg.cut(1, "tp")',
}
ATTENTION = {"fused.weight": "{}", "fused.bias": "{}", "out.weight": 'cg.cut(1, "tp")'}


def test_fused_rows_in_groups_of_heads() -> None:
    cuts = cuts_of(derived(Decoder(2, is_grouped=True)))
    by_heads = {name: text.format('cg.cut(0, "tp")') for name, text in ATTENTION.items()}
    assert cuts == by_heads | MLP | VOCABULARY


def test_equal_blocks_of_heads() -> None:
    cuts = cuts_of(derived(Decoder(4, is_grouped=False)))
    blocks = {n: text.format('cg.cut(0, "tp", blocks=3)') for n, text in ATTENTION.items()}
    assert cuts == blocks | MLP | VOCABULARY


def test_unequal_blocks_stay_whole_and_a_note_says_why() -> None:
    plan = derived(Decoder(2, is_grouped=False))
    assert cuts_of(plan) == MLP | VOCABULARY
    assert str(plan).splitlines()[-1] == (
        "# whole: layers.*.fused, layers.*.out: the result of the first is split into unequal "
        "parts of 16, 8, 8"
    )


def test_a_tied_head_is_cut_once() -> None:
    cuts = cuts_of(derived(Decoder(4, is_grouped=False, tied=True)))
    assert cuts["*embed.weight"] == 'cg.cut(0, "tp")'
    assert "*head.weight" not in cuts


def test_a_model_without_memory_has_the_same_plan() -> None:
    with cg.empty_weights():
        empty = Decoder(2, is_grouped=True)
    assert derived(empty) == derived(Decoder(2, is_grouped=True))
    assert all(parameter.is_meta for parameter in empty.parameters())


def test_heads_are_not_cut() -> None:
    model = Decoder(2, is_grouped=True)
    with pytest.raises(ValueError, match=r"fused.weight' has 2 heads, which cannot be cut to 4"):
        lay_out(model, derived(model), cg.whole, mesh(tp=4))


def test_what_has_no_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing of LayerNorm can be cut along tp: no projection"):
        cg.plans.derived(nn.LayerNorm(3), example={"input": torch.zeros(1, 3)})
    with pytest.raises(ValueError, match="no plan can be derived for LayerNorm, since its forward"):
        cg.plans.derived(nn.LayerNorm(3), example={"ids": torch.zeros(1, 3)})
