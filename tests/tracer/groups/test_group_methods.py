"""Methods of actors on meshes take, give and do the same as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.tracer.method import joint

from ...worlds import virtual_world

ROWS = cg.cut(0, "dp")
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))

_world = virtual_world(4)


@cg.actor
class Layer(nn.Module):
    """A layer with methods that give no tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()

    def nothing(self, x: Tensor) -> None:
        x @ self.weight.t()

    def sizes(self, x: Tensor) -> dict[str, Any]:
        return {"rows": x.shape[0], "rate": 0.5}

    def number(self) -> int:
        return self.weight.shape[0]

    def draws(self, x: Tensor) -> None:
        torch.rand_like(x)


@pytest.mark.parametrize("store", [cg.whole, ROWS], ids=["whole", "stored"])
def test_methods_that_give_no_tensor(store: Any) -> None:
    arguments = "forward(x)|nothing(x)|sizes(x)|draws(x)"
    plan = {arguments: ROWS, "weight": cg.cut(0, "tp")}
    actor, plain = Layer.on(cg.mesh(dp=2, tp=2), plan=plan, store=store)(), Layer()  # type: ignore[attr-defined]

    @cg.trace
    def step(x: Tensor) -> Any:
        h = actor.forward(x)
        gone = actor.nothing(x), actor.nothing(h), actor.draws(h)
        cg.backward(h.sum())
        return h, gone, actor.sizes(h), actor.number()

    h, gone, sizes, number = step(X)
    torch.testing.assert_close(h, plain.forward(X).detach())
    assert (gone, sizes, number) == ((None, None, None), plain.sizes(X), 6)


@cg.actor
class Writer(nn.Module):
    """Writes in place to what it has computed: a sum over ranks, where `a` is cut along columns."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Linear(6, 4)
        self.b = nn.Linear(4, 6)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        WRITES[self.kind](h)
        return self.b(h)

    def stepped(self, x: Tensor) -> Tensor:
        h = self.a(x)
        above = h.detach().clone()
        above.gt_(0)  # ones and zeros, and no booleans
        whole = (10 * h.detach()).int()
        whole //= 3
        return self.b(h * above * whole)

    def asked(self, x: Tensor) -> Tensor:
        h = cg.layout(self.a(x), cg.cut(0, "dp")).relu()
        return self.b(torch.where(h > h.mean(), h.exp(), h.clamp(-1, 1)))


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "a power": lambda h: h.pow_(2),
    "a power by entry": lambda h: h.abs_().pow_(torch.full((4,), 2.0)),
    "a product with float64": lambda h: h.mul_(torch.full(h.shape, 0.3, dtype=torch.float64)),
    "a clamp": lambda h: h.add_(1).clamp_(0.1, 0.7),
    "a sum": lambda h: h.sub_(0.5).mul_(3),
}
PLANS = {
    "columns": {"a.weight": cg.cut(1, "tp")},
    "rows": {"a.*": cg.cut(0, "tp"), "b.weight": cg.cut(1, "tp")},
}


@pytest.mark.grid(1)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("method", ["forward", "stepped", "asked"])
def test_sums_over_ranks_are_reduced_where_an_op_is_not_linear(method: str, plan: str) -> None:
    for kind in WRITES if method == "forward" else ["a sum"]:
        shardings = {f"{method}(x)": ROWS, **PLANS[plan]}
        actor = Writer.on(cg.mesh(dp=2, tp=2), plan=shardings)(kind)  # type: ignore[attr-defined]
        plain = Writer(kind)

        def step(writer: Any, x: Tensor, method: str = method) -> Any:
            made = getattr(writer, method)(x)
            loss = made.square().sum()
            if isinstance(writer, Writer):
                loss.backward()
            else:
                cg.backward(loss)
            return made, loss

        found = cg.trace(lambda x, step=step, actor=actor: step(actor, x))(X)
        made, loss = step(plain, X)
        torch.testing.assert_close(found, (made.detach(), loss.detach()))
        grad = plain.b.bias.grad
        for piece in actor.instances.values():
            torch.testing.assert_close(piece.b.bias.grad, grad)


@cg.actor
class Scaled(nn.Module):
    """Alike those with the same factor, on whatever mesh."""

    def __init__(self, seed: int, factor: float) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
        self.register_buffer("shift", torch.full((6,), float(seed), dtype=torch.float64))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()).tanh() * self.factor + self.shift


def test_alike_actors_on_meshes_share_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    trace = joint._JointTrace.trace

    def counted(run: joint._JointTrace) -> joint.Joint:
        nonlocal count
        count += 1
        return trace(run)

    monkeypatch.setattr(joint._JointTrace, "trace", counted)
    made = [(0, 2.0), (1, 2.0), (2, 2.0), (3, 2.0), (4, 0.5)]
    grids: list[dict[str, int]] = [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 1}, {"dp": 1, "tp": 3}]
    places = [cg.mesh(**grid) for grid in (*grids, {"dp": 2}, {"dp": 4})]
    plans = [
        {"forward(x)": ROWS, "weight|shift": cg.cut(0, "tp")},
        {"forward(x)": cg.cut(1, "dp"), "weight": cg.cut(1, "dp")},
        {"forward(x)": cg.cut(0, "tp")},
        {"forward(x)": ROWS},
        {"forward(x)": cg.cut(1, "dp"), "weight": cg.cut(1, "dp")},
    ]
    actors = [
        Scaled.on(place, plan=plan)(*args)  # type: ignore[attr-defined]
        for place, plan, args in zip(places, plans, made, strict=True)
    ]
    plain = [Scaled(*args) for args in made]

    @cg.trace
    def step(x: Tensor) -> Tensor:
        for actor in actors:
            x = actor.forward(x)
        loss = x.square().sum()
        cg.backward(loss)
        return loss

    x = X.double()
    for layer in plain:
        x = layer.forward(x)
    loss = x.square().sum()
    loss.backward()
    torch.testing.assert_close(step(X.double()), loss.detach())
    for actor, layer in zip(actors, plain, strict=True):
        for rank, piece in actor.instances.items():
            logical = actor._group.logical["weight"]
            whole = layer.weight.grad
            if logical.layout is not None:
                region = logical.layout.region(logical.shape, actor.place.position(rank))
                (rows,), (columns,) = region
                whole = whole[slice(*rows), slice(*columns)]
            torch.testing.assert_close(piece.weight.grad, whole)
    # The forward, and that with its backward: of the first actor, whose input needs no gradient, of
    # the three that are alike, and of the last; and of the square and the sum of the step.
    assert count == 2 * (3 + 2)


@cg.actor
class Holder(nn.Module):
    """A layer that holds another actor."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_instances_of_a_mesh_hold_one_actor() -> None:
    other = Layer.on(0)()  # type: ignore[attr-defined]
    holder = Holder.on(cg.mesh(dp=2))(other)  # type: ignore[attr-defined]
    assert [instance.other is other for instance in holder.instances.values()] == [True, True]
