"""Opaque methods, and methods that are called as they are because they work on gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from cg.ir.attributes import Effect
from cg.ir.ops.module import FunctionKind
from cg.ir.types import DType, ObjectType, TensorType
from cg.tracer.errors import TraceError
from cg.tracer.function.functions import Functions
from cg.tracer.values.interface import MethodTarget
from cg.tracer.values.opaque import opaque
from cg.tracer.values.specs import ObjectSpec, Tree

from .function_tools import signature, state_of, trace, trace_vjp

pytestmark = pytest.mark.timeout(120)

X = torch.ones(2, 3)


class Returner:
    """Returns what it was made with, and promises what it is given."""

    def __init__(self, made: Any) -> None:
        self.made = made

    @opaque(fake=lambda self, x: x)
    def given(self, x: torch.Tensor) -> Any:
        return self.made


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls = 0
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)

    @opaque
    def count(self, text: Any) -> str:
        self.calls += 1
        return f"{text}{self.calls}"

    @opaque(returns=2)
    def two(self, x: torch.Tensor, wrong: bool = False) -> Any:
        return (x.tolist(),) if wrong else (x.tolist(), [x.sum().item()])

    @opaque(returns=0)
    def none(self, x: torch.Tensor) -> Any:
        return ()

    @opaque(fake=lambda self, x, n, text: {"y": x.new_empty(n, 3), "text": text})
    def faked(self, x: torch.Tensor, n: int, text: Any) -> Any:
        rows = n + 1 if text == "wrong" else n
        return {"y": self.linear(x)[:1].expand(rows, 3), "text": f"{text}!"}

    @opaque(fake=lambda self, x: x.item())
    def bad_fake(self, x: torch.Tensor) -> Any:
        return x

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def late_update(self) -> int:
        self.calls += 1
        with torch.no_grad():
            self.linear.bias.add_(1)
        self.optimizer.step()
        return self.calls

    def decay(self) -> None:
        self.scheduler.step()

    def clip(self) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    def clear(self) -> None:
        self.zero_grad()

    def drop_gradient(self) -> None:
        self.linear.weight.grad = None

    def train_alone(self, x: torch.Tensor) -> float:
        loss = self.linear(x).pow(2).mean()
        loss.backward()
        return loss.item()

    def train_by_function(self, x: torch.Tensor) -> None:
        torch.autograd.backward(self.linear(x).sum())

    def has_optimizer(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if self.optimizer is not None else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_an_opaque_method_is_not_run_while_tracing() -> None:
    actor = Actor()
    traced = trace(actor, "count", "a")
    declaration = traced.declaration
    assert actor.calls == 0
    assert (declaration.kind, declaration.effect) == (FunctionKind.OPAQUE, Effect.WRITE)
    assert declaration.outputs == (ObjectType(),)
    assert traced.guard is None
    assert traced.body() == ("a1",)
    assert traced.body() == ("a2",)
    assert declaration.loc is not None
    assert declaration.loc.function == "count"


def test_object_arguments() -> None:
    actor = Actor()
    leaves, spec = pytree.tree_flatten(((0,), {}))
    target = MethodTarget("actor", actor, "count")
    traced = Functions().trace(target, Tree((ObjectSpec(),), spec), "count", None)
    assert traced.declaration.inputs == (ObjectType(),)
    assert len(leaves) == 1
    assert traced.body("b") == ("b1",)


def test_several_objects() -> None:
    traced = trace(Actor(), "two", X)
    assert traced.declaration.outputs == (ObjectType(), ObjectType())
    assert traced.results.fill([1, 2]) == (1, 2)
    assert traced.body(X) == ([[1, 1, 1], [1, 1, 1]], [6])
    assert trace(Actor(), "none", X).body(X) == (None,)
    with pytest.raises(TypeError, match=r"Actor.two \(.*\) is marked @cg.opaque\(returns=2\)"):
        trace(Actor(), "two", X, wrong=True).body(X)


def test_tensors_by_a_fake() -> None:
    actor = Actor()
    traced = trace(actor, "faked", X, 4, "t")
    assert traced.declaration.outputs == (TensorType(DType.F32, (4, 3)), ObjectType())
    y, text = traced.body(X)
    assert text == "t!"
    assert y.is_contiguous()
    assert not y.requires_grad
    assert torch.equal(y, actor.linear(X)[:1].expand(4, 3))
    with pytest.raises(
        TypeError, match=r"returned \{'y': float32\[5,3\], 'text': str}, but its fake promised"
    ):
        trace(actor, "faked", X, 4, "wrong").body(X)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (torch.ones(5), r"returned float32\[5\], but its fake promised float32\[4\]\. Types are"),
        (torch.ones(4).double(), r"returned float64\[4\], but its fake promised float32\[4\]\."),
        (None, r"returned None, but its fake promised float32\[4\]\."),
        ([torch.ones(4)], r"returned \[float32\[4\]\], but its fake promised float32\[4\]\."),
        (torch.ones(4).to_sparse(), r"returned a tensor of layout torch.sparse_coo, .*to_dense"),
        (torch.ones(4, device="meta"), r"returned a tensor on 'meta', which has no elements"),
    ],
)
def test_what_breaks_the_promise_of_a_fake(made: Any, message: str) -> None:
    place = r"Returner.given \(.*test_opaque.py:\d+, in given\) "
    with pytest.raises(TypeError, match=place + message) as caught:
        trace(Returner(made), "given", torch.ones(4)).body(torch.ones(4))
    assert "TreeSpec" not in str(caught.value)


def test_a_fake_that_fails() -> None:
    with pytest.raises(TraceError, match="the fake of the opaque Actor") as caught:
        trace(Actor(), "bad_fake", X)
    assert caught.value.remedy
    assert caught.value.loc is not None


def test_marks_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="not both"):
        opaque(fake=lambda x: x, returns=1)
    with pytest.raises(ValueError, match="not negative"):
        opaque(returns=-1)
    with pytest.raises(TypeError, match="below @staticmethod"):
        opaque(staticmethod(len))


def test_the_mark_leaves_the_method_as_it_is() -> None:
    assert Actor().count("x") == "x1"


def test_an_opaque_method_has_no_derivative() -> None:
    with pytest.raises(TraceError, match="opaque, so it has no derivative"):
        trace_vjp(Actor(), "two", (0,), (0,), X)


METHODS = ["update", "late_update", "decay", "clip", "clear", "drop_gradient"]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("method", [*METHODS, "train_alone", "train_by_function"])
def test_methods_that_work_on_gradients_are_called_as_they_are(method: str) -> None:
    actor, plain = Actor(), Actor()
    plain.load_state_dict(actor.state_dict())
    for one in (actor, plain):
        one.linear(X).pow(2).sum().backward()
    grads = [p.grad for p in actor.parameters()]
    copies = [p.grad.clone() for p in plain.parameters()]
    args = (X,) if "train" in method else ()
    traced = trace(actor, method, *args)

    declaration = traced.declaration
    assert (declaration.kind, declaration.effect) == (FunctionKind.OPAQUE, Effect.WRITE)
    assert declaration.outputs == (ObjectType(),)
    for p, grad, copy in zip(actor.parameters(), grads, copies, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, copy)
    assert actor.calls == 0
    assert actor.optimizer.state == {}
    assert actor.scheduler.last_epoch == 0
    assert type(actor) is Actor
    assert type(actor.optimizer) is torch.optim.Adam

    for _ in range(2):
        with torch.no_grad():
            (result,) = traced.body(*args)
        assert result == getattr(plain, method)(*args)
    assert actor.scheduler.last_epoch == plain.scheduler.last_epoch
    for name, value in state_of(plain).items():
        assert torch.equal(state_of(actor)[name], value)
        ours = state_of(actor)[name].grad
        assert (ours is None) == (value.grad is None)
        assert ours is None or torch.equal(ours, value.grad)


def test_an_optimizer_of_someone_else_is_noticed_too() -> None:
    actor = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(actor.parameters(), lr=1.0)

    class Updater:
        def update(self) -> None:
            optimizer.step()

    assert trace(Updater(), "update").declaration.kind is FunctionKind.OPAQUE


def test_a_look_at_the_optimizer_is_no_use_of_it() -> None:
    traced = trace(Actor(), "has_optimizer", X)
    assert traced.declaration.kind is FunctionKind.GRAPH


def test_training_by_traced_calls_and_an_optimizer() -> None:
    """Two microbatches, an update, three times: as plain PyTorch does it."""
    actor, plain = Actor(), Actor()
    plain.load_state_dict(actor.state_dict())
    vjp = trace_vjp(actor, "forward", (0,), (), X)
    update = trace(actor, "update").body
    for i in range(3):
        for x in (X + i, X - i):
            vjp.second.only_body(*vjp.first.only_body(x)[1:], torch.full((2, 3), 0.5))
            plain(x).backward(torch.full((2, 3), 0.5))
        assert update() == (None,)
        plain.update()
        for name, value in state_of(plain).items():
            assert torch.equal(state_of(actor)[name], value)


def test_signatures_with_static_arguments() -> None:
    assert signature(X, 3).values == (0,)
