"""Graphs compiled by TorchInductor: memory, strides and state are as without."""

from __future__ import annotations

import operator
import os
import shutil
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cg.backends.fusion import few_queries
from cg.backends.fusion.fuse import fuser
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
    fused = vjp.second.only_body.refit(fuser("inductor"))  # type: ignore[attr-defined]
    with torch.no_grad():
        out, *saved = vjp.first.only_body(X)

    def gradients(body: Any, times: int) -> list[Tensor]:
        plain.zero_grad()
        for _ in range(times):
            body(*saved, torch.ones_like(out))
        return [p.grad.clone() for p in plain.parameters() if p.grad is not None]

    for times in (1, 3):
        right, found = gradients(vjp.second.only_body, times), gradients(fused, times)
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


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        mixed = nn.functional.scaled_dot_product_attention(query * 2, key, key + 1, mask)
        return mixed.transpose(1, 2).flatten(2)


class Called(TorchDispatchMode):
    """Notes whether torch's kernel for attention is called."""

    kernel = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.kernel |= func is few_queries.KERNEL
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("queries", [few_queries.FEW, few_queries.FEW + 1])
def test_few_queries_need_no_kernel_for_attention(queries: int) -> None:
    query, key = torch.randn(2, queries, 3, 8).transpose(1, 2), torch.randn(2, 3, 7, 8)
    mask = torch.where(torch.arange(7) > torch.arange(queries)[:, None], -torch.inf, 0.0)
    body = trace(Attention(), "forward", query, key, mask).body
    fused = body.refit(fuser("inductor"))  # type: ignore[attr-defined]
    with Called() as plain:
        right = body(query, key, mask)
    with Called() as called:
        found = fused(query, key, mask)
    torch.testing.assert_close(found, right)
    assert plain.kernel
    assert called.kernel is (queries > few_queries.FEW)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_loops_attend_as_the_kernel_does(dtype: torch.dtype, scale: float | None) -> None:
    query = torch.randn(2, few_queries.FEW, 3, 8, dtype=dtype).transpose(1, 2)
    key, value = torch.randn(2, 2, 3, 7, 8, dtype=dtype)
    shut = torch.rand(2, 1, few_queries.FEW, 7) > 0.6
    shut[0, 0, 0] = True  # this one sees nothing
    mask = torch.zeros(shut.shape, dtype=dtype).masked_fill(shut, -torch.inf)
    for given in (None, mask):
        right = few_queries.KERNEL(query, key, value, attn_mask=given, scale=scale)[0]
        (found,) = few_queries.attend(query, key, value, attn_mask=given, scale=scale)
        atol = 4e-3 if dtype is torch.bfloat16 else 1e-6  # in which the kernel holds shares
        torch.testing.assert_close(found, right, rtol=torch.finfo(dtype).eps * 8, atol=atol)
        assert found.stride() == right.stride()


@pytest.mark.parametrize(
    ("heads", "options"), [(1, ()), (3, (0.0, True))], ids=["shared heads", "causal"]
)
def test_what_loops_do_not_know_is_left_to_the_kernel(heads: int, options: Any) -> None:
    query, key = torch.randn(2, 3, 2, 8), torch.randn(2, heads, 7, 8)
    right = few_queries.KERNEL(query, key, key, *options)
    assert all(map(torch.equal, few_queries.attend(query, key, key, *options), right))


def test_attention_with_a_backward_keeps_the_kernel() -> None:
    graph = torch.fx.Graph()
    query = graph.placeholder("query")
    for index in (0, 1):
        node = graph.call_function(few_queries.KERNEL, (query, query, query))
        graph.call_function(operator.getitem, (node, index))
    few_queries.loop_over_few(graph)
    targets = [node.target for node in graph.nodes if node.target is not operator.getitem]
    assert targets == ["query", few_queries.attend, few_queries.KERNEL]
