"""`cg.layout` gives values other layouts where it is asked to, in steps and in methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg

from ...worlds import virtual_world


@cg.actor
class Sorter(nn.Module):
    """Sorts what it has computed along a dimension that may be cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()

    def sorted(self, x: Tensor) -> Tensor:
        h = cg.layout(x @ self.weight.t(), cg.cut(0, "dp"))
        return h.sort(1)[0].square().sum()

    def columns(self, x: Tensor) -> Tensor:
        return cg.layout(x, cg.cut(1, "dp")).square()

    def cut_twice(self, x: Tensor) -> Tensor:
        return cg.layout(x, cg.cut(0, "tp") & cg.cut(1, "tp"))


_world = virtual_world(4)


X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
COLUMNS = {"weight": cg.cut(0, "tp"), "sorted(x)|forward(x)": cg.cut(0, "dp")}


def on(plan: Any = None) -> Any:
    return Sorter.on(cg.mesh(dp=2, tp=2), plan=COLUMNS if plan is None else plan)()  # type: ignore[attr-defined]


def test_a_method_gathers_where_it_is_asked_to() -> None:
    """And so does its backward, which reduces what it has to."""
    actor, plain = on(), Sorter()

    @cg.trace
    def step(x: Tensor) -> Tensor:
        loss = actor.sorted(x)
        cg.backward(loss)
        return loss

    loss = plain.sorted(X)
    loss.backward()
    torch.testing.assert_close(step(X), loss.detach())
    for rank, piece in actor.instances.items():
        rows = slice(3 * (rank % 2), 3 * (rank % 2) + 3)
        torch.testing.assert_close(piece.weight.grad, plain.weight.grad[rows])


def test_a_step_gives_a_value_another_layout() -> None:
    actor, other = on(), on({"forward(x)": cg.cut(1, "tp"), "weight": cg.cut(1, "tp")})
    plain = Sorter()

    @cg.trace
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        h = cg.layout(actor.forward(x), cg.cut(1, "dp", "tp"))
        loss = other.forward(h).sum()
        cg.backward(loss)
        return h, loss

    h = plain.forward(X)
    loss = plain.forward(h).sum()
    assert "f32[5,6/dp.tp]@dp2_tp2" in step.lower(X).as_text()
    torch.testing.assert_close(step(X), (h.detach(), loss.detach()))


def test_a_gradient_goes_back_to_the_layout_of_its_argument() -> None:
    """The method has the argument moved from rows to columns, and so its gradient is moved back."""
    actor, plain = on(COLUMNS | {"columns(x)": cg.cut(0, "dp")}), Sorter()

    @cg.trace
    def step(x: Tensor) -> Tensor:
        loss = actor.columns(actor.forward(x)).sum()
        cg.backward(loss)
        return loss

    loss = plain.columns(plain.forward(X)).sum()
    loss.backward()
    torch.testing.assert_close(step(X), loss.detach())
    for rank, piece in actor.instances.items():
        rows = slice(3 * (rank % 2), 3 * (rank % 2) + 3)
        torch.testing.assert_close(piece.weight.grad, plain.weight.grad[rows])


def test_in_one_process_it_is_the_tensor() -> None:
    x = X.clone().requires_grad_()
    made = cg.layout(x, cg.cut(0, "any"))
    assert torch.equal(made, x)
    made.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def no_mesh() -> Callable[..., Any]:
    actor = Sorter.on(0)()  # type: ignore[attr-defined]
    return lambda x: cg.layout(actor.forward(x), cg.whole)


def no_axis() -> Callable[..., Any]:
    actor = on()
    return lambda x: cg.layout(actor.forward(x), cg.cut(0, "ep"))


def twice() -> Callable[..., Any]:
    actor = on()
    return lambda x: actor.cut_twice(x)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (no_mesh, "cg.layout of %forward, f32[5,6]@0, whose place is no mesh"),
        (no_axis, "%forward is cut along 'ep', but the mesh dp=2, tp=2"),
        (twice, "cg.layout: an axis of tp cuts %i_1 twice"),
    ],
)
def test_what_is_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(cg.TraceError) as caught:
        cg.trace(build()).lower(X)
    assert message in str(caught.value)
    assert caught.value.loc is not None
    assert caught.value.loc.file == __file__


def test_what_is_no_sharding() -> None:
    with pytest.raises(TypeError, match=r"cg.layout takes cg.cut\(...\) or cg.whole, not 'dp'"):
        cg.layout(X, "dp")  # type: ignore[arg-type]
