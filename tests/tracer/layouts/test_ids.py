"""Indices into a dimension that is cut: out of range they are an error, as on one rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from cg.tracer.graph.layouts.versions import End

from ...sampling import examples
from .simulation import check, layout, mesh, simulate

SIZE = 7
IGNORED = -100
IMAGE = torch.randn(2, SIZE, 2, 2, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1))
LOOKUPS: dict[str, tuple[Callable[..., Any], Tensor, tuple[int, ...], str]] = {
    "embedding": (lambda w, i: functional.embedding(i, w), ROWS.t(), (2, 2), "tp,-"),
    "gather": (lambda x, i: x.gather(1, i), ROWS, (4, 1), "-,tp"),
    "cross entropy": (lambda x, t: functional.cross_entropy(x, t), ROWS, (4,), "-,tp"),
    "cross entropy of pixels": (
        lambda x, t: functional.cross_entropy(x, t),
        IMAGE,
        (2, 2, 2),
        "-,tp,-,-",
    ),
    "nll of one": (lambda x, t: functional.nll_loss(x[0], t), ROWS, (), "-,tp"),
}
"""The lookup, what is looked up in, the shape of indices, and the cut."""


@pytest.mark.parametrize("name", LOOKUPS)
@given(data=st.data())
@examples(80)
def test_indices_at_borders(name: str, data: st.DataObject) -> None:
    function, source, shape, axes = LOOKUPS[name]
    ignores = name not in ("embedding", "gather")
    odd = [-2, -1, SIZE, SIZE + 1, 2**40, *[IGNORED] * (3 * ignores)]
    each = st.one_of(st.integers(0, SIZE - 1), st.sampled_from([0, SIZE - 1]), st.sampled_from(odd))
    count = torch.Size(shape).numel()
    ids = torch.tensor(data.draw(st.lists(each, min_size=count, max_size=count))).reshape(shape)
    place = mesh(dp=2, tp=data.draw(st.sampled_from([2, 3, 9])))
    rows = "dp" if shape and data.draw(st.booleans()) else "-"
    layouts = [layout(axes), layout(",".join([rows, *"-" * (len(shape) - 1)] if shape else []))]
    outside = ((ids < 0) | (ids >= SIZE)) & ~((ids == IGNORED) & ignores)
    if not outside.any():
        check(function, [source, ids], layouts, place, tolerance=1e-5)
        return
    with pytest.raises(IndexError, match="is out of range: the dimension has 7 entries") as info:
        simulate(function, [source, ids], layouts, place)
    places = [f"index {ids[tuple(at)]} at {at.tolist()} is" for at in outside.nonzero()]
    assert any(text in str(info.value) for text in places), str(info.value)


class Classes:
    def forward(self, ids: Tensor) -> Tensor:
        return functional.one_hot(ids, SIZE).sum(-2)


@pytest.mark.parametrize("outside", [None, -1, SIZE])
@pytest.mark.parametrize("ranks", [1, 2])
def test_classes_that_there_are_not(ranks: int, outside: int | None) -> None:
    """Torch raises where it computes at once, and has rows of zeros where it is traced."""
    with use_world(VirtualWorld(ranks)):
        home = cg.mesh(dp=ranks) if ranks > 1 else 0
        actor = cg.actor(Classes).on(
            home, plan={"forward(ids)": cg.cut(0, "dp")} if ranks > 1 else None
        )()

        @cg.trace
        def step(ids: Tensor) -> Tensor:
            return actor.forward(ids)

        ids = torch.arange(8).reshape(4, 2) % SIZE
        compiled = step.lower(ids).compile()
        assert torch.equal(compiled(ids), Classes().forward(ids))
        if outside is not None:
            ids[3, 1] = outside
            with pytest.raises(RuntimeError, match="Class values must be"):
                Classes().forward(ids)
            with pytest.raises(
                (IndexError, cg.RemoteError), match=rf"one_hot: index {outside} at \[3, 1\]"
            ):
                compiled(ids)


@given(data=st.data())
@examples(60)
def test_gradients_by_frequency(data: st.DataObject) -> None:
    """A row's gradient is divided by how often all ranks' ids ask for it, in each piece's rows."""
    count = data.draw(st.integers(1, 8))
    ids = torch.tensor(
        data.draw(st.lists(st.integers(0, SIZE - 1), min_size=count, max_size=count))
    )
    padding = data.draw(st.sampled_from([-1, 0, 3, SIZE - 1]))
    place = mesh(dp=2, tp=data.draw(st.sampled_from([2, 3, 9])))

    def backward(gradient: Tensor, ids: Tensor) -> Tensor:
        return torch.ops.aten.embedding_dense_backward(gradient, ids, SIZE, padding, True)

    gradient = torch.randn(count, 3, dtype=torch.float64)
    ends = [End(layout("tp,-"))]
    layouts = [layout("-,-"), layout("-")]
    check(backward, [gradient, ids], layouts, place, tolerance=1e-12, ends=ends)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(SIZE, 4)
        self.head = nn.Linear(4, SIZE)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.table(ids)), targets)


def test_an_embedding_by_frequency_trains_as_on_one_rank() -> None:
    """The vocabulary is cut, so each rank's first row must not collect the ids of others."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(SIZE, 4, scale_grad_by_freq=True)
            self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

        def loss(self, ids: Tensor) -> Tensor:
            return self.table(ids).square().sum()

        def update(self) -> None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    ids = torch.tensor([0, 4, 4, 6, 0, 0])
    alone = Table()
    losses = []
    for _ in range(3):
        losses.append(alone.loss(ids))
        losses[-1].backward()
        alone.update()
    with use_world(VirtualWorld(2)):
        model = cg.actor(Table).on(cg.mesh(tp=2), plan={"table.weight": cg.cut(0, "tp")})()

        @cg.trace
        def step(ids: Tensor) -> Tensor:
            loss = model.loss(ids)
            cg.backward(loss)
            model.update()
            return loss

        compiled = step.lower(ids).compile()
        torch.testing.assert_close([compiled(ids) for _ in range(3)], [x.detach() for x in losses])


@pytest.mark.parametrize(
    ("ids", "targets", "text"),
    [
        ([0, 6, 7], [0, 1, 2], "embedding: index 7 at [2] is out of range"),
        ([-1, 6, 1], [0, 1, 2], "embedding: index -1 at [0] is out of range"),
        ([0, 6, 1], [0, 7, 2], "nll_loss: index 7 at [1] is out of range"),
        ([0, 6, 1], [0, -100, -1], "nll_loss: index -1 at [2] is out of range"),
    ],
)
def test_a_step_raises_and_trains_nothing(ids: list[int], targets: list[int], text: str) -> None:
    plan = {"table.weight|head.weight|head.bias": cg.cut(0, "tp")}
    with use_world(VirtualWorld(2)):
        model = cg.actor(Model).on(cg.mesh(tp=2), plan=plan)()

        @cg.trace
        def step(ids: Tensor, targets: Tensor) -> Tensor:
            loss = model.loss(ids, targets)
            cg.backward(loss)
            return loss

        good = torch.tensor([0, 6, 1]), torch.tensor([0, -100, 6])
        compiled = step.lower(*good).compile()
        loss = compiled(*good)
        torch.testing.assert_close(loss, Model().loss(*good).detach())
        with pytest.raises(cg.RemoteError, match="IndexError on rank") as info:
            compiled(torch.tensor(ids), torch.tensor(targets))
    assert text in str(info.value)
    raised = info.value.failure.raised
    assert raised is not None
    assert raised.line == inspect.getsourcelines(Model.loss)[1] + 1
    assert isinstance(info.value.__cause__, IndexError)
