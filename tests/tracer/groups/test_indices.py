"""Indices on meshes give what they give in one process, exactly, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import cg

from ...sampling import examples
from ...worlds import virtual_world

WIDTH = 4
USES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    # Along the batch, which is cut: `i` has as many indices as there are rows, or others.
    "rows": lambda m, x, i: x[i],
    "rows from the end": lambda m, x, i: x[i - len(x)],
    "rows beside rows": lambda m, x, i: x + x.index_select(0, i) if len(i) == len(x) else x[i],
    "entries": lambda m, x, i: x[i, i % WIDTH],
    "rows of flags": lambda m, x, i: x[i] * (x > 0)[i],
    "gathered": lambda m, x, i: x.gather(0, i[:, None].expand(-1, WIDTH)),
    "taken along": lambda m, x, i: x.take_along_dim(i[:, None], 0),
    "added up": lambda m, x, i: x.index_add(0, i, m.bias.expand(len(i), -1)),
    "put": lambda m, x, i: x.index_put((i[:1],), m.bias[None]),
    "filled": lambda m, x, i: x.index_fill(0, i, 2.0) + m.bias,
    "scattered": lambda m, x, i: x.scatter(0, i[:1, None].expand(-1, WIDTH), m.bias[None]),
    "scattered and added": lambda m, x, i: x.scatter_add(
        0, i[:, None].expand(-1, WIDTH), m.bias.expand(len(i), -1)
    ),
    # Along a dimension that is whole.
    "columns": lambda m, x, i: x[:, i % WIDTH] * 2,
    "a column of each row": lambda m, x, i: x.gather(1, x.detach().argsort(1)[:, :2]),
    "scattered in rows": lambda m, x, i: torch.zeros_like(x).scatter_(
        1, x.detach().argsort(1)[:, :1], x[:, :1]
    ),
    # Indices that are cut as the rows are.
    "a table": lambda m, x, i: m.table[(x.detach() > 0).long().sum(1)],
    "groups": lambda m, x, i: m.table.index_add(0, (x.detach() > 0).long().sum(1), x),
    "groups of zeros": lambda m, x, i: x.new_zeros(6, WIDTH).index_put_(
        ((x.detach() > 0).long().sum(1),), x, accumulate=True
    ),
    "counts": lambda m, x, i: m.count(x),
}


@cg.actor
class Indexing(nn.Module):
    def __init__(self, use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use = use
        self.bias = nn.Parameter(torch.randint(-3, 4, (WIDTH,)).double())
        self.table = nn.Parameter(torch.randint(-3, 4, (6, WIDTH)).double())
        self.register_buffer("counted", torch.zeros(6, dtype=torch.int64))

    def count(self, x: Tensor) -> Tensor:
        index = (x.detach() > 0).long().sum(1)
        self.counted.index_add_(0, index, torch.ones_like(index))
        return x

    def loss(self, x: Tensor, i: Tensor) -> Tensor:
        made = USES[self.use](self, x * self.bias, i)
        weights = torch.arange(made.numel(), dtype=made.dtype).view(made.shape)
        return (made * weights).sum()


_world = virtual_world(4)


@pytest.mark.parametrize("use", USES)
@given(data=st.data())
@examples(12)
def test_indices_over_cut_rows(use: str, data: st.DataObject) -> None:
    """Of integers, exactly: with several ranks, rows that are cut unevenly, and stored tensors."""
    rows, count = data.draw(st.integers(2, 7)), data.draw(st.integers(1, 5))
    axes = data.draw(st.sampled_from([{"dp": 2}, {"dp": 3}, {"dp": 2, "tp": 2}]))
    plan: dict[str, Any] = {"loss(x)": cg.cut(0, "dp")}
    if data.draw(st.booleans()):
        plan["table"] = cg.cut(0, "tp") if "tp" in axes else cg.whole
    store = data.draw(st.sampled_from([cg.whole, cg.cut(0, "dp")]))
    actor = Indexing.on(cg.mesh(**axes), plan=plan, store=store)(use)  # type: ignore[attr-defined]
    plain = Indexing(use)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randint(-3, 4, (rows, WIDTH), generator=generator).double()
    i = torch.randperm(rows, generator=generator).repeat(count)[:count]

    def step(x: Tensor, i: Tensor) -> Tensor:
        loss: Tensor = actor.loss(x, i)
        cg.backward(loss)
        return loss

    found = cg.trace(step)(x, i)
    loss = plain.loss(x, i)
    loss.backward()
    torch.testing.assert_close(found, loss.detach(), rtol=0, atol=0)
    for rank, instance in actor.instances.items():
        torch.testing.assert_close(instance.counted, plain.counted)
        for name, parameter in plain.named_parameters():
            if parameter.grad is None:
                continue
            logical = actor._group.logical[name]
            expected = parameter.grad
            if logical.layout is not None:
                region = logical.layout.region(logical.shape, actor.place.position(rank))
                kept = [k for start, stop in region[0] for k in range(start, stop)]
                expected = expected.index_select(0, torch.tensor(kept, dtype=torch.int64))
            mine = dict(instance.named_parameters())[name].grad
            torch.testing.assert_close(mine, expected, rtol=0, atol=0)


@cg.actor
class Shuffled(nn.Module):
    def rows(self, x: Tensor, i: Tensor) -> Tensor:
        return x[i]

    def gathered(self, x: Tensor, i: Tensor) -> Tensor:
        return x[cg.layout(i, cg.whole)]


PLAN = {"rows(x)|rows(i)|gathered(x)|gathered(i)": cg.cut(0, "dp")}


def test_rows_and_indices_that_one_axis_cuts() -> None:
    actor = Shuffled.on(cg.mesh(dp=2), plan=PLAN)()  # type: ignore[attr-defined]
    x, i = torch.randn(4, 3), torch.tensor([3, 0, 0, -2])
    with pytest.raises(cg.TraceError, match=r"aten\.index\.Tensor needs .*would have to be gathe"):
        cg.trace(lambda x, i: actor.rows(x, i)).lower(x, i)
    torch.testing.assert_close(cg.trace(lambda x, i: actor.gathered(x, i))(x, i), x[i])


@pytest.mark.parametrize("index", [4, -5])
def test_an_index_beyond_cut_rows(index: int) -> None:
    actor = Shuffled.on(cg.mesh(dp=2), plan={"rows(x)": cg.cut(0, "dp")})()  # type: ignore[attr-defined]
    with pytest.raises(cg.RemoteError, match=rf"index: index {index} at \[1\] is out of range"):
        cg.trace(lambda x, i: actor.rows(x, i))(torch.randn(4, 3), torch.tensor([0, index]))
