"""Whole methods with their derivatives: blocks with integers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from cg.tracer.graph.layouts.cases import LayoutError

from ...sampling import examples
from .joint_tools import compare
from .op_cases import ints
from .simulation import ALL, mesh

GRID = mesh(dp=2, tp=2)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(ints(*parameter.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return self(self.norm(x)).square().mean()

    def weighted(self, x: torch.Tensor) -> torch.Tensor:
        """Rows one by one, with numbers that torch makes tensors of."""
        return torch.vmap(lambda row: row * (row.sum() * 2 - 1))(self(x))


class Attention(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.qkv(x).split(width, -1)
        shape = (rows, tokens, self.heads, width // self.heads)
        q, k, v = (each.view(shape).transpose(1, 2) for each in (q, k, v))
        made = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(made.transpose(1, 2).reshape(rows, tokens, width))

    def products(self, x: torch.Tensor) -> torch.Tensor:
        """The same without a fused kernel and without a softmax, so that sums are exact."""
        rows, tokens, width = x.shape
        q, k, v = self.qkv(x).split(width, -1)
        shape = (rows, tokens, self.heads, width // self.heads)
        q, k, v = (each.view(shape).transpose(1, 2) for each in (q, k, v))
        made = (q @ k.transpose(-1, -2)).tril() @ v
        return self.out(made.transpose(1, 2).reshape(rows, tokens, width))


COLUMN_ROW = {"up.weight": "tp,-", "up.bias": "tp", "down.weight": "-,tp"}
PACKED = {"qkv.weight": "3*tp,-", "qkv.bias": "3*tp", "out.weight": "-,tp"}


def integers(actor: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.copy_(ints(*parameter.shape))
    return actor


def test_numbers_of_vmap() -> None:
    compare(*(MLP(), "weighted", COLUMN_ROW, GRID, [ints(4, 6)], ["dp,-"]), tolerance=0)


@pytest.mark.parametrize(("axes", "rows"), [((2, 2), 4), ((2, 2), 3), ((3, 2), 2), ((1, 3), 4)])
def test_an_mlp_cut_by_column_and_row(axes: tuple[int, int], rows: int) -> None:
    place = mesh(dp=axes[0], tp=axes[1])
    run = compare(MLP(), "forward", COLUMN_ROW, place, [ints(rows, 5, 6)], ["dp,-,-"], tolerance=0)
    # One in the forward, and one for the gradient of the input.
    assert Counter(change.value for change in run.changes) == {"reduce": 2}
    assert len(run.cut.parts) == 2, "the two do not depend on each other"


def test_gradients_stay_sums_where_their_tensor_is_a_copy() -> None:
    run = compare(MLP(), "normed", COLUMN_ROW, GRID, [ints(4, 6)], ["dp,-"], tolerance=1e-9)
    summands = [layout.summands for layout in run.outputs if layout is not None]
    assert summands[0] == (), "a result is no sum over ranks"
    assert summands[1] == (), "a gradient of rows that are cut is cut alike"
    assert set(summands[2:]) == {("dp",)}


@pytest.mark.parametrize("rows", [4, 3])
def test_attention_cut_by_heads(rows: int) -> None:
    compare(Attention(), "forward", PACKED, GRID, [ints(rows, 3, 8)], ["dp,-,-"], tolerance=1e-9)
    actor = integers(Attention())
    run = compare(actor, "products", PACKED, GRID, [ints(rows, 3, 8)], ["dp,-,-"], tolerance=0)
    # One in the forward, and one for the gradient of the input, which is no sum over ranks.
    assert Counter(change.value for change in run.changes) == {"reduce": 2}


TEXTS = st.sampled_from(["-,-", "dp,-", "-,dp", "tp,-", "-,tp", "dp,tp", "tp,dp", "dp.tp,-"])


@given(up=TEXTS, down=TEXTS, rows=st.sampled_from(["-,-,-", "dp,-,-", "-,tp,-", "tp,-,dp"]))
@examples(12)
def test_random_plans_of_an_mlp(up: str, down: str, rows: str) -> None:
    plan = {"up.weight": up, "down.weight": down}
    compare(MLP(), "forward", plan, GRID, [ints(3, 2, 6)], [rows], tolerance=0, allowed=ALL)


def test_an_axis_with_more_ranks_than_heads_of_keys_says_what_to_do() -> None:
    actor = Attention(heads=2)
    with pytest.raises(LayoutError, match="whose pieces are not those of 2 x 4") as caught:
        compare(
            actor, "forward", PACKED, mesh(dp=1, tp=4), [ints(2, 3, 8)], ["dp,-,-"], tolerance=0
        )
    assert caught.value.loc is not None
    assert caught.value.loc.file == __file__
    factored = {name: text.replace("tp", "kv.rep") for name, text in PACKED.items()}
    place = mesh(kv=2, rep=2)
    compare(
        actor, "forward", factored, place, [ints(2, 3, 8)], ["-,-,-"], tolerance=1e-9, allowed=ALL
    )
