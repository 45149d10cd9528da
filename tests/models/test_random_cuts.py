"""Models with random wiring between layers: stages give what the model gives, or are refused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import cg

from ..sampling import of_shard, shards
from .test_cut_layers import check_gradients

WIDTH = 4
"""Of tensors, which are square, so that a view that is turned is like others."""

Step: TypeAlias = tuple[str, int, int]

# What is differentiated is cloned, since "write" writes in place, and autograd would refuse that.
WIRES = ("layer", "layer", "layer", "module", "again", "same", "add", "table", "turn", "write")


class TwoResults(nn.Module):
    """A layer that takes two tensors and gives two, or gives back one that it has taken."""

    def __init__(self, passes: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.passes = passes

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x.clone()) + other
        return y, other if self.passes else y * x.clone()


class Wiring(nn.Module):
    """Runs steps one after the other, each on tensors before it, and gives the last two tensors.

    Args:
        steps: for each what it does, and which tensors it takes.
        inner: what the step "inner" runs, which has layers of its own.
    """

    def __init__(self, steps: Sequence[Step], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.steps = tuple(steps)
        count = sum(kind == "layer" for kind, _, _ in steps)
        self.layers = nn.ModuleList(TwoResults(index % 3 == 2) for index in range(count))
        self.others = nn.ModuleDict(
            {
                str(index): nn.Identity() if kind == "same" else nn.Linear(WIDTH, WIDTH)
                for index, (kind, _, _) in enumerate(steps)
                if kind in ("module", "same")
            }
        )
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(WIDTH))
        self.inner = inner

    def extra_repr(self) -> str:
        return str(self.steps)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x, x * 2]
        layers = iter(self.layers)
        for index, (kind, i, j) in enumerate(self.steps):
            a, b = values[i % len(values)], values[j % len(values)]
            values.extend(self._step(kind, str(index), a, b, layers))
        return values[-1], values[-2]

    def _step(self, kind: str, name: str, a: Any, b: Any, layers: Any) -> tuple[Any, ...]:
        match kind:
            case "layer":
                return next(layers)(a, b)  # type: ignore[no-any-return]
            case "inner":
                assert self.inner is not None
                return self.inner(a)  # type: ignore[no-any-return]
            case "module" | "same":
                return (self.others[name](a if kind == "same" else a.clone()),)
            case "again":
                return (self.shared(a.clone()),)
            case "add":
                return (a + b,)
            case "table":
                return (a.clone() * self.table,)
            case "turn":
                return (a.t(),)
            case _:
                return (a.add_(b.detach().clone()),)


def steps(*more: str) -> st.SearchStrategy[list[Step]]:
    place = st.integers(0, 30)
    return st.lists(st.tuples(st.sampled_from([*WIRES, *more]), place, place), max_size=12)


@st.composite
def models(draw: st.DrawFn) -> Wiring:
    torch.manual_seed(0)
    inner, middle = draw(steps()), ("inner", draw(st.integers(0, 30)), 0)
    outer = [*draw(steps()), middle, *draw(steps()), ("layer", 1, 2), ("layer", 1, 3)]
    model = Wiring(outer, Wiring([*inner, ("layer", 0, 1)]))
    return model.double()


def run(cuts: Any, x: torch.Tensor) -> tuple[Any, list[Any]]:
    moving: Any = None
    lent: dict[str, torch.Tensor] = {}
    parts = [cuts.part(index) for index in range(len(cuts))]
    for part in parts:
        moving = part(moving, x.clone(), lent=lent)
        lent |= part.lend()
    return moving, parts


def cut_at_random(model: Wiring, x: torch.Tensor, data: st.DataObject) -> Any:
    """The cuts of a model between some of its layers; None if they are refused."""
    layers = len(cg.cut_layers(model, 1, example={"x": x})[0].layers)
    inner = data.draw(st.sets(st.integers(1, layers - 1), min_size=1, max_size=3))
    lengths = [b - a for a, b in itertools.pairwise([0, *sorted(inner), layers])]
    try:
        return cg.cut_layers(model, lengths, example={"x": x})
    except ValueError as error:
        if "cannot be cut in front of" not in str(error):
            raise
        return None


@pytest.mark.parametrize("shard", shards(16))
def test_stages_give_what_the_model_gives(shard: int) -> None:
    compared = 0

    @given(models(), st.data())
    @of_shard(shard, 25)
    def search(model: Wiring, data: st.DataObject) -> None:
        nonlocal compared
        x = torch.randn(WIDTH, WIDTH, dtype=torch.float64)
        cuts = cut_at_random(model, x, data)
        if cuts is None:
            return
        wanted = model(x.clone())
        output, parts = run(cuts, x)
        for mine, whole in zip(output, wanted, strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-12)
        sum(value.sin().sum() for value in wanted).backward()
        sum(value.sin().sum() for value in output).backward()
        check_gradients(model, parts)
        compared += 1

    search()
    assert compared > 5
