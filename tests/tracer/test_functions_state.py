"""State of an actor in traced methods: mutation is replayed, rebinding written back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cg.ir.attributes import Effect
from cg.tracer.errors import TraceError
from cg.tracer.function.functions import Functions
from cg.tracer.values.interface import MethodTarget

from .function_tools import (
    assert_equal,
    assert_same_run,
    check_equal,
    run_eager,
    run_traced,
    signature,
    state_of,
    trace,
    trace_vjp,
)

pytestmark = pytest.mark.timeout(120)

X = torch.arange(6.0).view(2, 3)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("ema", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(4, 3))
        self.register_buffer("a", torch.ones(3))
        self.register_buffer("b", torch.full((3,), 2.0))
        self.plain = torch.zeros(3)
        self.listed = [torch.zeros(3)]

    def pure(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def rebind(self, x: torch.Tensor) -> torch.Tensor:
        self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)
        self.count = self.count + 1
        self.plain = self.plain + 1
        self.listed[0] = self.listed[0] + 2
        return self.linear(x) + self.ema

    def in_place(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.ema.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.cache[1:3] = x
            self.cache.index_copy_(0, torch.tensor([0]), x[:1])
            self.count += 1
        return self.linear(x) * self.ema

    def swap(self, x: torch.Tensor) -> torch.Tensor:
        self.a, self.b = self.b, self.a
        return x + self.a

    def store_input(self, x: torch.Tensor) -> torch.Tensor:
        self.plain = x.detach()[0]
        y = x * 2
        self.ema = y.detach()[1]
        return y

    def old_value_in_backward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.ema
        self.ema = self.ema + 1
        return y

    def clip(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return self.linear(x)


@pytest.mark.parametrize(
    ("method", "effect"),
    [
        ("pure", Effect.PURE),
        ("read", Effect.READ),
        ("rebind", Effect.UPDATE),
        ("in_place", Effect.UPDATE),
        ("swap", Effect.UPDATE),
        ("store_input", Effect.UPDATE),
        ("old_value_in_backward", Effect.UPDATE),
        ("clip", Effect.WRITE),
    ],
)
def test_state_and_effect(method: str, effect: Effect) -> None:
    x = X.clone().requires_grad_()
    check_equal(Stateful(), method, x)
    assert trace(Stateful(), method, x).declaration.effect is effect


@pytest.mark.parametrize("method", ["rebind", "in_place", "store_input"])
def test_plain_attributes_and_lists_too(method: str) -> None:
    ours, theirs = Stateful(), Stateful()
    body = trace(ours, method, X).body
    for _ in range(3):
        body(X)
        getattr(theirs, method)(X)
    assert torch.equal(ours.plain, theirs.plain)
    assert torch.equal(ours.listed[0], theirs.listed[0])


def test_a_stored_value_is_a_copy() -> None:
    actor = Stateful()
    x = X.clone()
    (y,) = trace(actor, "store_input", x).body(x)
    x.zero_()
    y.zero_()
    assert actor.plain.tolist() == [0, 1, 2]
    assert actor.ema.tolist() == [6, 8, 10]


@pytest.mark.parametrize("method", ["in_place", "old_value_in_backward", "clip"])
def test_backward_sees_the_state_of_its_own_forward(method: str) -> None:
    """Two forwards, then two backwards: each as if it had been alone."""
    actor = Stateful()
    vjp = trace_vjp(actor, method, (0,), (0,), X.clone().requires_grad_())
    alone = []
    for x in (X, X + 1):
        saved = vjp.first.only_body(x)[1:]
        alone.append((saved, copy.deepcopy(vjp.second.only_body(*saved, torch.ones(2, 3)))))
    for saved, (expected,) in alone:
        (again,) = vjp.second.only_body(*saved, torch.ones(2, 3))
        assert torch.equal(again, expected)


def test_batch_norm_statistics_advance_in_every_call() -> None:
    ours, theirs = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    body = trace(ours, "forward", X).body
    for i in range(3):
        body(X + i)
        theirs(X + i)
    for name, value in state_of(theirs).items():
        assert torch.equal(state_of(ours)[name], value)
    assert ours.num_batches_tracked == 3


def test_batch_norm_whose_result_is_not_used() -> None:
    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.norm(x)
            return x + 1

    check_equal(Probe(), "forward", X.clone().requires_grad_())
    assert trace(Probe(), "forward", X).declaration.effect is Effect.UPDATE


def test_batch_norm_in_training_saves_no_statistics() -> None:
    net = nn.BatchNorm1d(3)
    vjp = trace_vjp(net, "forward", (0,), (0,), X.clone().requires_grad_())
    assert vjp.second.declaration.effect is Effect.ACCUMULATE
    shapes = [getattr(t, "shape", None) for t in vjp.first.declaration.outputs[1:]]
    assert shapes == [(2, 3), (3,), (3,)]


def test_checkpoint_recomputes_batch_norm_as_eager_does() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    ours, x = Net(), X.clone().requires_grad_()
    theirs = copy.deepcopy(ours)
    assert_same_run(
        run_traced(ours, "forward", (x,), {}, 0), run_eager(theirs, "forward", (x,), {}, 0), 0.0
    )
    vjp = trace_vjp(Net(), "forward", (0,), (0,), X.clone().requires_grad_())
    assert vjp.second.declaration.effect is Effect.WRITE


def test_parameters_are_looked_up_when_a_body_runs() -> None:
    actor = nn.Linear(3, 3)
    body = trace(actor, "forward", X).body
    other = nn.Linear(3, 3)
    actor.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(body(X)[0], other(X))
    actor.weight.data = torch.zeros(3, 3)
    assert torch.equal(body(X)[0], actor.bias.expand(2, 3))


def test_gradients_go_to_the_live_parameters() -> None:
    actor = nn.Linear(3, 3)
    vjp = trace_vjp(actor, "forward", (0,), (), X)
    actor.load_state_dict(nn.Linear(3, 3).state_dict(), assign=True)
    vjp.second.only_body(*vjp.first.only_body(X)[1:], torch.ones(2, 3))
    first = actor.weight.grad
    assert torch.equal(first, X.sum(0).expand(3, 3))
    vjp.second.only_body(*vjp.first.only_body(X)[1:], torch.ones(2, 3))
    assert actor.weight.grad is first
    assert torch.equal(first, 2 * X.sum(0).expand(3, 3))


class Refused(nn.Module):
    """One method for each change of state that a graph cannot make."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(2, 3))
        self.register_buffer("other", torch.zeros(2, 3))
        self.step = 0
        self.hist: list[Any] = []
        self.last: Any = None

    def counts(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return x * self.step

    def appends(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        self.hist.append(y)
        return y

    def appends_once(self, x: torch.Tensor) -> torch.Tensor:
        if not self.hist:
            self.hist.append(x * 2)
        return x

    def keeps(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * 2
        return x

    def new_attribute(self, x: torch.Tensor) -> torch.Tensor:
        self.fresh = getattr(self, "fresh", 0) + 1
        return x

    def deletes(self, x: torch.Tensor) -> torch.Tensor:
        del self.step
        return x

    def grows(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x])
        return x

    def with_history(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.linear(x)
        return x

    def new_parameter(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight = nn.Parameter(self.linear.weight * 2)
        return self.linear(x)

    def set_data(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.data = x
        return x

    def freezes(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.requires_grad_(False)
        return self.linear(x)

    def writes_input(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x

    def writes_view_of_input(self, x: torch.Tensor) -> torch.Tensor:
        x.t()[0] = 0
        return self.linear(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.calls = getattr(self.linear, "calls", 0) + 1
        return x


@pytest.mark.parametrize(
    ("method", "says", "line"),
    [
        ("counts", "changes the attribute 'step' (from 0 to 1)", "self.step += 1"),
        ("appends", "attribute 'hist'", "def appends"),
        ("appends_once", "stores a traced value in the attribute 'hist'", "def appends_once"),
        ("keeps", "stores a traced value in the attribute 'last'", "self.last = x * 2"),
        ("new_attribute", "attribute 'fresh' (from nothing to 1)", "self.fresh = getattr"),
        ("deletes", "attribute 'step' (from 0 to nothing)", "del self.step"),
        ("grows", "replaces the tensor 'seen'", "self.seen = torch.cat"),
        ("with_history", "gradient history in 'seen'", "self.seen = self.linear(x)"),
        ("new_parameter", "replaces the parameter 'linear.weight'", "self.linear.weight ="),
        ("set_data", "sets Tensor.data", "self.seen.data = x"),
        ("freezes", "requires_grad of 'linear.weight'", "def freezes"),
        ("writes_input", "writes in place to argument 0", "x += 1"),
        ("writes_view_of_input", "writes in place to argument 0", "x.t()[0] = 0"),
        ("inner", "attribute 'linear.calls' (from nothing to 1)", "self.linear.calls = getattr"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_refused_changes(method: str, says: str, line: str, grad: bool) -> None:
    actor = Refused()
    before = copy.deepcopy(vars(actor)), {k: id(v) for k, v in state_of(actor).items()}
    with pytest.raises(TraceError) as caught:
        trace(actor, method, X.clone().requires_grad_(grad))
    error = caught.value
    assert says in error.reason
    assert error.remedy
    assert error.loc is not None
    assert line in _line(error.loc.file, error.loc.line)
    assert {k: id(v) for k, v in state_of(actor).items()} == before[1]
    assert vars(actor).keys() == before[0].keys()
    assert (actor.step, actor.hist, actor.last) == (0, [], None)
    assert type(actor) is Refused
    assert type(actor.linear) is nn.Linear
    assert not hasattr(actor.linear, "calls")
    assert actor.linear.weight.requires_grad


LIBRARY = """
from torch import nn

class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(3, 3), None

    def forward(self, x):
        self.last = None
        self.last = self.linear(x)
        return self.last.sin()

    def again(self, x):
        h = self.linear(x) if self.last is None else self.last
        self.last = h
        return h.sin()

    def read(self, x):
        return x + self.last
"""


def library_layer() -> Any:
    """A layer of an installed package that keeps what it has computed last."""
    space: dict[str, Any] = {"__name__": "library"}
    exec(compile(LIBRARY, "/lib/site-packages/library.py", "exec"), space)
    torch.manual_seed(0)
    return space["Keeping"]()


@pytest.mark.parametrize("grad", [False, True])
def test_what_a_library_keeps_and_writes_anew_is_left_out(grad: bool) -> None:
    layer, x = library_layer(), X.clone().requires_grad_(grad)
    wanted = run_eager(copy.deepcopy(layer), "forward", (x,), {}, 0)
    for _ in range(2):  # with the attribute as it was, and as the first trace has left it
        layer.zero_grad()
        assert_same_run(run_traced(layer, "forward", (x,), {}, 0), wanted, 1e-6)
    assert layer.last is not None
    assert repr(layer.last) == "<a tensor that a step has not kept in 'last'>"
    assert type(copy.deepcopy(layer).last) is type(layer.last)
    with pytest.raises(TraceError, match="'last' is read, and a traced method has stored a tensor"):
        trace(layer, "read", X)
    for use in (float, bool, lambda last: last.shape, lambda last: torch.sin(last)):
        with pytest.raises(TraceError, match="set the attribute back to None"):
            use(layer.last)
    layer.last = None
    layer.zero_grad()
    assert_same_run(run_traced(layer, "forward", (x,), {}, 0), wanted, 1e-6)


def test_what_a_library_keeps_and_reads_again_is_refused() -> None:
    layer = library_layer()
    with pytest.raises(TraceError, match="stores a traced value in the attribute 'last'"):
        trace(layer, "again", X)
    assert layer.last is None


def _line(file: str, line: int) -> str:
    with open(file, encoding="utf-8") as source:
        return source.readlines()[line - 1]


def test_state_is_as_before_after_a_good_trace() -> None:
    actor = Stateful()
    before = {k: (id(v), v.clone()) for k, v in state_of(actor).items()}
    trace_vjp(actor, "rebind", (0,), (0,), X.clone().requires_grad_())
    for name, value in state_of(actor).items():
        assert id(value) == before[name][0]
        assert torch.equal(value, before[name][1])
    assert all(p.grad is None for p in actor.parameters())


def test_attributes_that_get_equal_values_are_not_changes() -> None:
    class Actor(nn.Module):
        sizes: Any = None

        def __init__(self) -> None:
            super().__init__()
            self.sizes = (2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.sizes = tuple(x.shape)
            return functional.relu(x)

    check_equal(Actor(), "forward", X.clone().requires_grad_())


def test_history_from_outside_the_step_is_refused() -> None:
    actor = Stateful()
    actor.plain = actor.linear(X)[0]
    with pytest.raises(TraceError, match="'plain', which carries gradient history"):
        trace(actor, "rebind", X)
    trace(actor, "read", X)


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(TraceError, match="'weight' is not initialised"):
        trace(nn.LazyLinear(3), "forward", X)


def test_tied_weights_sum_their_gradients() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = nn.Linear(3, 3)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)))

    check_equal(Tied(), "forward", X.clone().requires_grad_())
    run = run_traced(Tied(), "forward", (X,), {}, 0)
    assert len([g for g in run.grads.values() if g is not None]) == 3


class Scaled(nn.Module):
    """One method whose backward reads a buffer, and one that updates it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale

    def adapt(self, x: torch.Tensor) -> None:
        self.scale.mul_(0.9).add_(x.mean(0), alpha=0.1)


def test_an_update_may_not_overtake_a_backward_that_reads_what_it_changes() -> None:
    sign, actor = signature(X.clone().requires_grad_()), Scaled()
    forward, adapt = (MethodTarget("actor", actor, name) for name in ("forward", "adapt"))

    functions = Functions()
    assert functions.trace(adapt, signature(X), "adapt", None).declaration.effect is Effect.UPDATE
    vjp = functions.trace_vjp(forward, sign, "v", (0,), (0,), None)
    assert vjp.second.declaration.effect is Effect.ACCUMULATE
    # It is given a copy of what the buffer was for its forward.
    result = vjp.first.only_body(X)
    before = vjp.second.only_body(*result[1:], torch.ones(X.shape))
    actor.linear.zero_grad()
    actor.scale.zero_()
    assert_equal(vjp.second.only_body(*result[1:], torch.ones(X.shape)), before)

    functions = Functions()
    vjp = functions.trace_vjp(forward, sign, "v", (0,), (0,), None)
    assert vjp.second.declaration.effect is Effect.ACCUMULATE
    assert functions.trace(adapt, signature(X), "adapt", None).declaration.effect is Effect.WRITE
