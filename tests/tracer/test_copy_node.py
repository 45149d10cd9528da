"""Copies of nodes are what torch makes of them."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from cg.tracer.method.purity.copy_node import copy_node


def function(x: Tensor, y: Tensor) -> list[Tensor]:
    a, b = torch.split(torch.cat([x, y]), 2)
    return [torch.add(a, b, alpha=2), a.view(4, -1), torch.zeros(2, dtype=torch.int64), x[:, 1:]]


def test_copies_are_those_of_torch() -> None:
    graph = make_fx(function, tracing_mode="fake")(torch.ones(2, 4), torch.ones(2, 4)).graph
    ours, theirs = fx.Graph(), fx.Graph()
    copies: list[dict[fx.Node, fx.Node]] = [{}, {}]
    for node in graph.nodes:
        copies[0][node] = copy_node(ours, node, copies[0].__getitem__)
        copies[1][node] = theirs.node_copy(node, copies[1].__getitem__)
    assert str(ours) == str(theirs)
    for one, other in zip(ours.nodes, theirs.nodes, strict=True):
        assert (one.name, one.op, one.target, one.type) == (
            other.name,
            other.op,
            other.target,
            other.type,
        )
        assert str((one.args, one.kwargs)) == str((other.args, other.kwargs))
        assert [n.name for n in one.users] == [n.name for n in other.users]
        assert one.meta == other.meta
        assert one.meta is not next(n for n in graph.nodes if n.name == one.name).meta
    ours.lint()
