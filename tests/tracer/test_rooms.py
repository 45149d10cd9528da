"""Rows that are computed in the memory that has room behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import cg
from cg.tracer.graph.codegen.rooms import rooms_of
from cg.tracer.method.experts.expert_products import GROUPED_MM
from cg.tracer.method.experts.rows_by_expert import OWN_ROWS, WITH_ROOM

COUNT, WIDTH = 12, 20
X = torch.randn(COUNT, WIDTH, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(COUNT).view(-1, 2) % 3


def written(x: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    rows = x * 2
    room = WITH_ROOM(rows, order, COUNT)
    rows.add_(1)
    return room + rows.sum()


def product(x: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    matrices = torch.arange(2.0 * WIDTH * WIDTH).view(2, WIDTH, WIDTH)
    return GROUPED_MM(x, matrices, ends)


def two_products(x: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """The rows that both take have room as long as the second needs it."""
    rows = x * 2
    first = WITH_ROOM(product(rows, order, ends), order, COUNT)
    return first + WITH_ROOM(product(rows, order, ends), order, COUNT)


def a_factor_in_a_room(x: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    rows = x * 2
    result = WITH_ROOM(product(rows, order, ends), order, COUNT)
    return result + WITH_ROOM(rows, order, COUNT)


def a_product_of_written_rows(x: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    rows = x * 2
    result = WITH_ROOM(product(rows, order, ends), order, COUNT)
    rows.add_(1)
    return result + rows.sum()


Rows = Callable[[Tensor, Tensor, Tensor], Tensor]


def in_room(rows: Rows) -> Rows:
    return lambda x, order, ends: WITH_ROOM(rows(x, order, ends), order, COUNT)


WAYS: dict[str, tuple[Rows, list[str]]] = {
    "product": (in_room(product), ["grouped_mm"]),
    "activation": (in_room(lambda x, *_: functional.silu(x)), ["silu"]),
    "of strided rows": (in_room(lambda x, *_: functional.silu(x[:, ::2])), ["silu"]),
    "gradient": (in_room(lambda x, *_: torch.ops.aten.silu_backward(x, x)), ["silu_backward"]),
    "number": (in_room(lambda x, *_: x * 2), ["mul"]),
    "two types": (in_room(lambda x, *_: x * x.double()), ["mul"]),
    "another type": (in_room(lambda x, *_: x > 0), []),
    "sum": (in_room(lambda x, *_: x.cumsum(1)), []),
    "input": (in_room(lambda x, *_: x), []),
    "transposed": (in_room(lambda x, *_: x.t().contiguous().t() * 2), []),
    "written": (written, []),
    "product of a product": (
        in_room(lambda x, *by: product(product(x, *by), *by)),
        ["grouped_mm", "grouped_mm"],
    ),
    "product of sorted rows": (
        in_room(lambda x, *by: product(x.index_select(0, by[0] % 8), *by)),
        ["grouped_mm", "index_select"],
    ),
    "two products": (two_products, ["grouped_mm", "grouped_mm", "mul"]),
    "a factor in a room": (a_factor_in_a_room, ["grouped_mm", "mul"]),
    "a product of written rows": (a_product_of_written_rows, ["grouped_mm"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_rows_in_rooms(way: str) -> None:
    function, ops = WAYS[way]

    def listed(x: Tensor, ids: Tensor) -> list[Tensor]:
        return [function(x, *OWN_ROWS(ids, 0, 2))]

    tracer = make_fx(listed, tracing_mode="fake", _allow_non_fake_inputs=True)
    graph = tracer(X, IDS).graph
    assert [str(node.target).split(".")[1] for node in rooms_of(graph, {}).of] == ops


class Method(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.rows = WAYS[way][0]

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        order, ends = OWN_ROWS(ids, 0, 2)
        sorted_rows = x.index_select(0, order)
        return self.rows(sorted_rows, order, ends)


@pytest.mark.parametrize("way", WAYS)
def test_values(way: str) -> None:
    """The graph runs on eight rows of twelve, and gives the bits of the method."""
    actor = cg.actor(Method).on(0)(way)
    step = cg.trace(lambda x, ids: actor.forward(x, ids))
    expected = Method(way)(X, IDS)
    for _ in range(2):
        result = step(X, IDS)
        assert torch.equal(result[:8], expected[:8])
        assert result.stride() == expected.stride()
