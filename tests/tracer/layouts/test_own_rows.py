"""Rows that ranks of experts hold in the order of their experts: values, and what is computed."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

import cg
from cg.tracer.graph.layouts.propagation.partition import Partition
from cg.tracer.method.experts.expert_products import EXPERT_LINEAR, EXPERT_OUTER, GROUPED_MM
from cg.tracer.method.experts.rows_by_expert import OWN_ROWS, ROWS_BACK, SUMS_BY_TOKEN, WITH_ROOM

from .simulation import check, layout, mesh, run

EXPERTS, WIDTH, TOKENS = 4, 6, 8
MUL = torch.ops.aten.mul.Tensor
OF_GROUPS: dict[str, Any] = {"op": "call_function", "target": GROUPED_MM}


def mixture(x: Tensor, up: Tensor, down: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    gate, h = cg.expert_linear(x, up, ids).chunk(2, -1)
    h = cg.expert_linear(functional.relu(gate) * h, down, ids)
    return x + (h * shares.unsqueeze(-1)).sum(1)


def gradients(*values: Tensor) -> tuple[Tensor, ...]:
    floating = [v.detach().requires_grad_() for v in values if v.is_floating_point()]
    left = iter(floating)
    result = mixture(*(next(left) if v.is_floating_point() else v for v in values))
    return result.detach(), *torch.autograd.grad(result.square().sum(), floating)


def tensors(ids: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    integers = partial(torch.randint, -3, 4, generator=generator)
    shapes = ((TOKENS, WIDTH), (EXPERTS, 2 * WIDTH, WIDTH), (EXPERTS, WIDTH, WIDTH))
    x, up, down = (integers(size=shape).double() for shape in shapes)
    return [x, up, down, ids, integers(size=tuple(ids.shape)).double()]


ROUTES = {
    "even": torch.arange(2 * TOKENS).reshape(TOKENS, 2) % EXPERTS,
    "first rank": torch.tensor([[0, 1]] * TOKENS),
    "last expert": torch.tensor([[3, 3]] * TOKENS),
    "one token": torch.tensor([[0, 1]] * (TOKENS - 1) + [[1, 2]]),
}
CUTS = {"ep": ("ep", {"ep": 2}), "dp.ep": ("dp.ep", {"dp": 2, "ep": 2}), "all": ("-", {"ep": 4})}


def graphs_of(cut: Partition) -> list[fx.Graph]:
    return [graph for part in cut.parts for graph in part.bodies.graphs]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("cut", CUTS)
def test_values(route: str, cut: str) -> None:
    """Integers of float64 are exact, however many rows a rank has. Other rows say nothing."""
    tokens, axes = CUTS[cut]
    layouts = [layout(t) for t in (f"{tokens},-", "ep,-,-", "ep,-,-", *[f"{tokens},-"] * 2)]
    given = tensors(ROUTES[route])
    found = check(gradients, given, layouts, mesh(**axes))
    copies = [node for node in found.propagation.graph.nodes if node.op == "placeholder"]
    by_node = dict(zip(copies, given, strict=True))
    rooms = 0
    for graph in graphs_of(found.cut):
        for node in graph.find_nodes(op="call_function", target=WITH_ROOM):
            node.target, rooms = poisoned, rooms + 1
    assert rooms
    results = run(found.cut, found.propagation, torch.nn.Module(), by_node)
    for result, expected in zip(results, gradients(*given), strict=True):
        assert result is not None
        assert torch.equal(result, expected)


def poisoned(rows: Tensor, order: Tensor, count: int) -> Tensor:
    """`WITH_ROOM`, whose rows of nobody are no numbers."""
    room = torch.full((count, *rows.shape[1:]), torch.nan, dtype=rows.dtype)
    room[: len(order)] = rows
    return room


def test_ids_are_sorted_once_a_part() -> None:
    """A rank computes its own rows alone, and adds them up over choices where they are."""
    layouts = [layout(t) for t in ("ep,-", "ep,-,-", "ep,-,-", "ep,-", "ep,-")]
    found = check(gradients, tensors(ROUTES["even"]), layouts, mesh(ep=2))
    counts = [Counter(node.target for node in graph.nodes) for graph in graphs_of(found.cut)]
    having = [count for count in counts if count[GROUPED_MM]]
    assert len(having) == 4, "of two ranks, in the forward and in the backward"
    for count in having:
        assert count[OWN_ROWS] == 1
        assert not count[EXPERT_LINEAR] + count[EXPERT_OUTER]
    forward, backward = having[0], having[-1]
    ops = (GROUPED_MM, SUMS_BY_TOKEN, ROWS_BACK)
    assert [forward[op] for op in ops] == [2, 1, 0]
    assert [backward[op] for op in ops] == [4, 1, 1], "gradients of shares are for each choice"
    graphs = [graph for graph in graphs_of(found.cut) if graph.find_nodes(**OF_GROUPS)]
    products = [n for g in graphs for n in g.find_nodes(op="call_function", target=MUL)]
    shapes = {tuple(node.meta["val"].shape[1:]) for node in products}
    assert shapes == {(WIDTH,)}, "gradients are multiplied by shares in the order of experts"


def test_a_value_that_others_take_as_well() -> None:
    """Rows of experts elsewhere are no zeros in a value that no product has made."""

    def function(x: Tensor, up: Tensor, ids: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.unsqueeze(1) * shares.unsqueeze(-1)
        return cg.expert_linear(rows, up, ids).sum(1), rows.cos().sum()

    x, up, _, ids, shares = tensors(ROUTES["one token"])
    layouts = [layout(t) for t in ("-,-", "ep,-,-", "-,-", "-,-")]
    found = check(function, [x, up[:, :WIDTH], ids, shares], layouts, mesh(ep=2))
    (rows,) = found.propagation.graph.find_nodes(op="call_function", target=MUL)
    assert rows not in found.propagation.own_rows


@pytest.mark.parametrize("first", [0, 2, 3])
def test_the_order_of_own_rows(first: int) -> None:
    """On a host it ends with the rank's rows; for a compiled graph it has all rows."""
    ids = torch.tensor([[3, 0], [2, 3], [0, 2], [4, 3]])
    own = [i for e in (first, first + 1) for i in range(8) if ids.flatten()[i] == e]
    order, ends = OWN_ROWS(ids, first, 2)
    assert order.tolist() == own
    assert ends.tolist() == [sum(int(ids.flatten()[i]) == first for i in own), len(own)]
    every, same = OWN_ROWS(ids, first, 2, all_rows=True)
    assert every[: len(own)].tolist() == own
    assert sorted(every.tolist()) == list(range(8))
    assert torch.equal(same, ends)


@pytest.mark.parametrize("wrong", [-1, 5, 2**32 + 3])
@pytest.mark.parametrize("is_last", [False, True])
def test_ids_of_no_expert(wrong: int, is_last: bool) -> None:
    ids = torch.tensor([[3, 0], [2, 4]])
    for total in (5, None):
        assert OWN_ROWS(ids, 2, 2, total, [6, 0])[0].tolist() == [2, 0]
    ids[-1, int(is_last)] = wrong
    assert OWN_ROWS(ids, 2, 2)[1][-1] == 1 + is_last
    with pytest.raises(IndexError, match=rf"expert_linear: index {wrong} at \[7, {int(is_last)}\]"):
        OWN_ROWS(ids, 2, 2, 5, [6, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sums_by_token(dtype: torch.dtype) -> None:
    """A half is rounded once, as `sum` does. Rows behind the last of an expert are none."""
    rows = torch.tensor([[1.0], [2**-9], [2**-9], [3.0], [torch.nan]], dtype=dtype)
    tokens, ends = torch.tensor([2, 2, 2, 0, 1]), torch.tensor([2, 4], dtype=torch.int32)
    sums = SUMS_BY_TOKEN(rows, tokens, ends, 4)
    assert sums.dtype is dtype
    expected = torch.tensor([3.0, 0.0, rows[:3].sum(), 0.0], dtype=dtype)
    assert torch.equal(sums[:, 0], expected)
    assert SUMS_BY_TOKEN(rows, tokens, ends[:0], 4).tolist() == [[0.0]] * 4
