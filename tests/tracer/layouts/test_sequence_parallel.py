"""Tokens that are cut by the axis of the weights: values, gradients, bytes and what is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cg.ir.types import Mesh
from cg.tracer.graph.layouts.change import Change

from .joint_tools import compare
from .simulation import Run, mesh

WIDTH, HEADS, VOCABULARY = 8, 4, 12


class RowNorm(nn.Module):
    """A root mean square norm, as models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    """A layer of a transformer, float64.

    Args:
        norm: "layer", or "rows" for the mean square.
        bias: whether layers have biases.
        packed: whether queries, keys and values are one product of a matrix of rows.
        post: whether results of layers are normed before they are added.
        drop: the rate of dropouts, within attention and of what layers add.
    """

    def __init__(self, norm: str, bias: bool, packed: bool, post: bool, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        norms = {"layer": lambda: nn.LayerNorm(WIDTH), "rows": RowNorm}
        self.norms = nn.ModuleList(norms[norm]() for _ in range(4 if post else 2))
        self.qkv = nn.ModuleList(
            nn.Linear(WIDTH, 3 * WIDTH // n, bias=bias) for n in ([1] if packed else [3, 3, 3])
        )
        self.o = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=bias) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=bias)
        self.drop = nn.Dropout(drop)
        self.post = self.norms[2:]
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        if len(self.qkv) == 1:
            rows = self.qkv[0](y.view(-1, WIDTH)).view(*y.shape[:-1], -1)
            q, k, v = rows.chunk(3, -1)
        else:
            q, k, v = (layer(y) for layer in self.qkv)
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (q, k, v))
        h = functional.scaled_dot_product_attention(q, k, v, None, self.drop.p, is_causal=True)
        h = h.transpose(1, 2).flatten(2)
        if len(self.qkv) == 1:
            h = self.o(h.view(-1, WIDTH)).view(h.shape)
        else:
            h = self.o(h)
        x = x + self.drop(self.post[0](h) if self.post else h)
        y = self.norms[1](x)
        h = self.down(functional.silu(self.gate(y)) * self.up(y))
        return x + self.drop(self.post[1](h) if self.post else h)


class Learned(Block):
    """A layer behind positions that are learned, of which it takes the first rows."""

    def __init__(self) -> None:
        super().__init__("layer", True, False, False)
        self.positions = nn.Embedding(11, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions.weight[: x.shape[1]])


PLAN = {
    "qkv.0.weight": "tp,-", "qkv.*.weight": "tp,-", "qkv.*.bias": "tp",
    "gate.weight": "tp,-", "up.weight": "tp,-", "gate.bias": "tp", "up.bias": "tp",
    "o.weight": "-,tp", "down.weight": "-,tp",
}  # fmt: skip


def plan_of(packed: bool) -> dict[str, str]:
    if not packed:
        return PLAN
    return {"qkv.0.weight": "3*tp,-", "qkv.0.bias": "3*tp"} | PLAN | {"qkv.0.weight": "3*tp,-"}


def run(
    block: Block, place: Mesh, length: int, cut: str, sequence: tuple[str, ...] = ("tp",)
) -> Run:
    x = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    plan = plan_of(len(block.qkv) == 1)
    operands = (block, "forward", plan, place, [x], [cut])
    return compare(*operands, tolerance=1e-10, sequence=sequence)


@pytest.mark.grid(1)
@pytest.mark.parametrize("norm", ["layer", "rows"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("length", [6, 7])
def test_a_layer(norm: str, bias: bool, packed: bool, post: bool, length: int) -> None:
    """Two gathers and two reductions in the forward, and the same in the backward."""
    made = run(Block(norm, bias, packed, post), mesh(tp=2), length, "-,tp,-")
    kinds = [t.change for t in made.propagation.transfers if t.change.communicates]
    assert kinds.count(Change.GATHER) == kinds.count(Change.REDUCE) == 4, kinds
    shapes = {str(t.after.layout) for t in made.propagation.transfers if t.before.layout.summands}
    assert len(shapes) == 1, "sums are reduced to tokens alone"
    assert len(made.propagation.passing) == 4


@pytest.mark.grid(1)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cut", ["-,cp.tp,-", "-,cp.tp~,-", "cp,tp,-"])
@pytest.mark.parametrize("sequence", [("tp",), ("cp", "tp")])
def test_beside_another_axis(packed: bool, cut: str, sequence: tuple[str, ...]) -> None:
    """An axis that cuts no weight cuts tokens as it does without `sequence=`."""
    made, other = (
        run(Block("rows", True, packed, True), mesh(cp=2, tp=2), 9, cut, axes)
        for axes in (sequence, ("tp",))
    )
    assert len(made.propagation.transfers) == len(other.propagation.transfers)


def test_dropout_draws_what_one_process_draws() -> None:
    run(Block("layer", True, False, False, drop=0.4), mesh(tp=2), 7, "-,tp,-")


@pytest.mark.parametrize("cut", ["-,tp,-", "-,cp.tp~,-"])
def test_positions_that_are_learned(cut: str) -> None:
    """A rank adds its rows of them; of the gradient, it has a summand."""
    positions, others = (
        run(block, mesh(cp=2, tp=2), 7, cut).propagation.transfers
        for block in (Learned(), Block("layer", True, False, False))
    )
    kinds = [[t.change for t in each if t.change is Change.GATHER] for each in (positions, others)]
    assert len(kinds[0]) == len(kinds[1]), "no gather more"
