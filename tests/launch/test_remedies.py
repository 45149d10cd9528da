"""Errors of steps whose remedy works: what is refused, and what is accepted in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

pytestmark = pytest.mark.timeout(120)

X = torch.ones(2, 4)
IDS = torch.tensor([0, 1, 1, 3])


def trained(loss: Any, *args: Any) -> Any:
    """One step that differentiates a method's result; its error, or None."""

    @cg.trace
    def step(*args: Any) -> Any:
        result = loss(*args)
        cg.backward(result)
        return result

    try:
        step(*args)
    except cg.TraceError as error:
        return error
    return None


def test_a_value_of_a_carry_is_detached() -> None:
    layer = cg.actor(nn.Linear).on(0)(4, 4)
    carry = cg.carry(torch.zeros(2, 4), on=0)

    def loss(x: torch.Tensor, detaches: bool) -> torch.Tensor:
        hidden = layer(x + carry.get())
        carry.set(hidden.detach() if detaches else hidden)
        return hidden.sum()

    error = trained(lambda x: loss(x, detaches=False), X)
    assert "a gradient could flow back through" in error.reason
    assert error.remedy == "write x.detach() instead of x"
    assert error.loc.file == __file__
    assert trained(lambda x: loss(x, detaches=True), X) is None


@dataclass
class Plain:
    hidden: torch.Tensor


@dataclass
class Registered:
    hidden: torch.Tensor


torch.export.register_dataclass(Registered)


@cg.actor
class Boxes(nn.Module):
    """It returns its result in a dataclass."""

    def __init__(self, box: type) -> None:
        super().__init__()
        self.linear, self.box = nn.Linear(4, 4), box

    def forward(self, x: torch.Tensor) -> Any:
        return self.box(self.linear(x))

    def loss(self, box: Any) -> torch.Tensor:
        return box.hidden.sum()  # type: ignore[no-any-return]


def test_a_dataclass_between_stages_is_registered() -> None:
    with use_world(VirtualWorld(2)):
        plain, registered = ([Boxes.on(i)(box) for i in range(2)] for box in (Plain, Registered))
        error = trained(lambda x: plain[1].loss(plain[0](x)), X)
        assert "torch.export.register_dataclass(Plain)" in error.remedy
        assert trained(lambda x: registered[1].loss(registered[0](x)), X) is None


@cg.actor
class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scaler = torch.amp.GradScaler("cpu")

    def by_scaler(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaler.scale(self.linear(x).sum())

    def by_number(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() * 1024.0


def test_a_loss_is_scaled_by_a_number() -> None:
    actor = Scaled.on(0)()
    error = trained(actor.by_scaler, X)
    assert "multiply the loss by a number instead of scaler.scale(loss)" in error.remedy
    assert trained(actor.by_number, X) is None


@cg.actor
class Table(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4, sparse=sparse)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids).square().sum()

    def choose(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (x @ self.embedding.weight)[ids].square().sum()


@pytest.mark.parametrize("name", ["embedding.weight", "look_up(ids)"])
def test_a_sparse_gradient_on_a_mesh(name: str) -> None:
    plan = {name: cg.cut(0, "tp")}
    with use_world(VirtualWorld(2)):
        mesh = cg.mesh(range(2), tp=2)
        sparse, dense = (Table.on(mesh, plan=cg.plan(plan))(each) for each in (True, False))
        error = trained(sparse.look_up, IDS)
        assert error.reason.startswith("in the backward, aten._sparse")
        assert "nn.Embedding(..., sparse=False)" in error.remedy
        assert trained(dense.look_up, IDS) is None


def test_rows_may_be_chosen_by_ids_that_are_cut() -> None:
    with use_world(VirtualWorld(2)):
        plan = cg.plan({"choose(ids)": cg.cut(0, "tp")})
        actor = Table.on(cg.mesh(range(2), tp=2), plan=plan)(False)
        assert trained(actor.choose, X, IDS % len(X)) is None
