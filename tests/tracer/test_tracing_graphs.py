"""Graphs of make_fx, while `nn.Module` stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from cg.tracer.methods.tracing_graphs import trace_graph

METHODS = ("__call__", "__getattr__")


def held() -> list[Any]:
    return [vars(nn.Module)[name] for name in METHODS]


def test_methods_of_modules_are_not_replaced() -> None:
    before = held()
    seen: list[Any] = []
    layer = nn.Linear(3, 2)

    def function(x: Tensor) -> Tensor:
        seen.extend(held())
        return layer(x).relu()

    made = trace_graph(function, torch.ones(4, 3))
    assert len(seen) == len(before)
    assert all(one is other for one, other in zip(seen, before, strict=True))
    assert not any(hasattr(method, "__fx_already_patched") for method in before)
    x = torch.randn(4, 3)
    assert torch.equal(made(x), layer(x).relu())


def test_a_function_may_trace_modules_by_fx() -> None:
    """It sees the layers of a module, for which fx has to replace these methods."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    kinds: list[str] = []
    before = held()

    def function(x: Tensor) -> Tensor:
        kinds.extend(node.op for node in fx.symbolic_trace(model).graph.nodes)
        return model(x)

    trace_graph(function, torch.ones(1, 3))
    assert kinds.count("call_module") == 2
    assert all(one is other for one, other in zip(held(), before, strict=True))


def test_an_error_leaves_no_mark() -> None:
    def function(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace_graph(function, torch.ones(1))
    assert not any(hasattr(method, "__fx_already_patched") for method in held())
