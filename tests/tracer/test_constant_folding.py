"""Values that a graph makes of numbers alone are made once, where nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import cg
from cg.tracer.graph.codegen.constant_folding import SMALL, fold_constants


def folded(function: Callable[[Tensor], Any]) -> list[str]:
    """The ops that are computed when the body is made."""

    def listed(x: Tensor) -> list[Tensor]:
        return [function(x)]

    graph = make_fx(listed, tracing_mode="fake")(torch.ones(4)).graph
    return [str(node.target).split(".")[1] for node in fold_constants(graph)]


@pytest.mark.parametrize(
    ("function", "ops"),
    [
        (lambda x: x + torch.arange(4), ["arange"]),
        (lambda x: x[:, None] > torch.arange(4).unsqueeze(0) * 2, ["arange", "unsqueeze", "mul"]),
        (lambda x: torch.zeros(4), []),  # it is given, and the caller may write to it
        (lambda x: torch.zeros(4).view(2, 2), []),
        (lambda x: x + torch.zeros(4).fill_(2), []),
        (lambda x: x + torch.zeros(4)[1:3].fill_(2).sum(), []),
        (lambda x: x + torch.rand(4), []),
        (lambda x: x + torch.empty(4).zero_(), []),
        (lambda x: x * torch.zeros(SMALL // 4 + 1).sum(), []),
        (lambda x: x * torch.zeros(SMALL // 4).sum(), ["zeros", "sum"]),
        (lambda x: x * torch.arange(4.0).max(0)[0], ["arange"]),  # several results are not kept
    ],
)
def test_what_is_computed_once(function: Callable[[Tensor], Any], ops: list[str]) -> None:
    assert folded(function) == ops


def test_a_dtype_that_depends_on_a_setting() -> None:
    graph = make_fx(lambda x: [x + torch.zeros(4)], tracing_mode="fake")(torch.ones(4)).graph
    for node in graph.nodes:
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "dtype"}
    assert len(fold_constants(graph)) == 1
    torch.set_default_dtype(torch.float64)
    try:
        assert fold_constants(graph) == {}
    finally:
        torch.set_default_dtype(torch.float32)


@cg.actor
class Masked(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.arange(4) > x[:, None]
        return torch.where(seen, -torch.inf, torch.zeros(())), torch.ones(2)


def test_values_are_those_of_the_method() -> None:
    actor = Masked.on(0)()  # type: ignore[attr-defined]
    step = cg.trace(lambda x: actor.forward(x))
    for _ in range(3):
        mask, ones = step(torch.arange(3))
        expected, _ = Masked().forward(torch.arange(3))
        torch.testing.assert_close(mask, expected)
        torch.testing.assert_close(ones, torch.ones(2))
        mask.zero_(), ones.zero_()
