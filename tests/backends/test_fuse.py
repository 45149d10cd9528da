"""Graphs compiled by TorchInductor: memory, strides and state are as without."""

from __future__ import annotations

import os
import shutil
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cg.backends.program.fuse import fuser
from tests.tracer.function_tools import trace, trace_vjp

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "g++")) is None,
        reason="no C++ compiler for TorchInductor",
    ),
]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
        self.register_buffer("seen", torch.zeros(4))
        self.table = torch.arange(4.0)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.seen.add_(x.mean(0))
        y = torch.tanh(x * self.weight) + self.table
        return y, x, y.t(), x[1], self.weight, self.seen * 1


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def shares(values: Any, x: Tensor) -> list[bool]:
    return [v.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for v in values]


def test_results_and_state() -> None:
    plain, fused = Mixed(), Mixed()
    right_body = trace(plain, "forward", X).body
    body = trace(fused, "forward", X).body.refit(fuser("inductor"))  # type: ignore[attr-defined]
    for _ in range(2):
        x = X.clone()
        right, found = right_body(x), body(x)
        torch.testing.assert_close(found, right)
        assert [v.stride() for v in found] == [v.stride() for v in right]
        assert shares(found, x) == shares(right, x)
        assert not any(v.requires_grad for v in found)
        assert not any(shares([v], fused.weight)[0] for v in found)
    torch.testing.assert_close(fused.seen, plain.seen)


def test_inputs_of_other_strides() -> None:
    body = trace(Mixed(), "forward", X).body
    fused = trace(Mixed(), "forward", X).body.refit(fuser("inductor"))  # type: ignore[attr-defined]
    strange = X.t().contiguous().t()
    torch.testing.assert_close(fused(strange), body(strange))


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5, bias=False)
        self.matrix = nn.Parameter(torch.randn(5, 6))
        self.odd = nn.Parameter(torch.randn(6, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(self.linear(x)) @ self.matrix) @ self.odd


def test_gradients() -> None:
    torch.manual_seed(0)
    plain = Product()
    vjp = trace_vjp(plain, "forward", (0,), (), X)
    fused = vjp.backward_body.refit(fuser("inductor"))  # type: ignore[attr-defined]
    with torch.no_grad():
        out, *saved = vjp.forward_body(X)

    def gradients(body: Any, times: int) -> list[Tensor]:
        plain.zero_grad()
        for _ in range(times):
            body(*saved, torch.ones_like(out))
        return [p.grad.clone() for p in plain.parameters() if p.grad is not None]

    for times in (1, 3):
        right, found = gradients(vjp.backward_body, times), gradients(fused, times)
        assert len(found) == 3
        torch.testing.assert_close(found, right)
        assert all(p.grad is not None and p.grad.stride() == p.stride() for p in plain.parameters())


def test_generators_are_as_before() -> None:
    before = torch.random.get_rng_state()
    trace(Mixed(), "forward", X).body.refit(fuser("inductor"))  # type: ignore[attr-defined]
    assert torch.equal(torch.random.get_rng_state(), before)


_LIBRARY = torch.library.Library("cg_test", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("look(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
_WATCHED: list[weakref.ref[Tensor]] = []
_ALIVE: list[list[bool]] = []


def _look(x: Tensor) -> Tensor:
    _ALIVE.append([ref() is not None for ref in _WATCHED])
    return x + 1


_LIBRARY.impl("look", _look, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("cg_test::look", torch.empty_like, lib=_LIBRARY)


def test_inputs_go_in_the_middle_of_the_code() -> None:
    """Those that are used up there, if nobody else holds them."""
    graph = torch.fx.Graph()
    first, second, third, held = map(graph.placeholder, ("first", "second", "third", "held"))
    used = graph.call_function(torch.ops.aten.mm.default, (first, second))
    used = graph.call_function(torch.ops.aten.mm.default, (used, held))
    used = graph.call_function(torch.ops.cg_test.look.default, (used,))
    graph.output((graph.call_function(torch.ops.aten.mm.default, (used, third)),))
    module = torch.fx.GraphModule(nn.Module(), graph)
    with FakeTensorMode():
        examples = [torch.empty(4, 4) for _ in range(4)]
    compute = fuser("inductor")(module, examples)
    values = [torch.rand(4, 4) for _ in range(4)]
    (right,) = module(*values)
    kept, copy = values[3], values[3].clone()
    values[0] = values[0].t().clone().t()  # of other strides: what is computed with is a copy
    _WATCHED[:] = map(weakref.ref, values)
    _ALIVE.clear()
    (found,) = compute(values)
    torch.testing.assert_close(found, right)
    assert _ALIVE == [[False, False, True, True]]
    assert not values
    assert kept is _WATCHED[3]()
    assert torch.equal(kept, copy)  # no kernel takes its memory


def test_inputs_stay_where_a_compiler_empties_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are right whatever a version of torch does with the list."""
    monkeypatch.setattr("torch._inductor.compile", lambda module, examples, options: module)
    body = trace(Mixed(), "forward", X).body
    right = body(X.clone())
    found = trace(Mixed(), "forward", X).body.refit(fuser("inductor"))(X.clone())  # type: ignore[attr-defined]
    torch.testing.assert_close(found, right)
