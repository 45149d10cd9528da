"""The graph that one rank runs for a part."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from cg.ir.layout import Layout
from cg.tracer.graph.layouts.propagation.local_graphs import LocalGraphBuilder
from cg.tracer.graph.layouts.versions import Version

from .simulation import check, layout, mesh, simulate


def test_each_value_and_layout_is_a_parameter_of_its_own() -> None:
    """A second layout of %exp is not called as %exp_1, which is another value."""

    def function(x: Tensor) -> Tensor:
        return x.exp() + x.exp()

    place = mesh(tp=2)
    run, _ = simulate(function, [torch.ones(4)], [layout("tp")], place)
    nodes = {node.name: node for node in run.propagation.graph.nodes}
    builder = LocalGraphBuilder(run.propagation, place.position(0))
    cut, whole = layout("tp"), Layout(layout("-").cuts)
    taken = [("exp", cut), ("exp", whole), ("exp_1", cut)]
    for name, kind in taken:
        builder.placeholder(Version(nodes[name], kind))
    builder.graph.output(tuple(builder.value(Version(nodes[n], kind)) for n, kind in taken))
    given = torch.ones(2), torch.full((4,), 2.0), torch.full((2,), 3.0)
    results = fx.GraphModule({}, builder.graph)(*given)
    assert all(map(torch.equal, results, given))


def test_a_piece_of_a_repeated_value_is_repeated_less() -> None:
    """It is neither cut nor copied; a piece of the repeated row is copied before."""

    def function(x: Tensor, row: Tensor) -> Tensor:
        return x * row.expand(4, 6)

    x, row = torch.arange(24.0).view(4, 6), torch.arange(6.0)
    expand = torch.ops.aten.expand.default
    for cut, copies, sizes in (("tp,-", 0, [2, 6]), ("-,tp", 1, [4, 3])):
        run = check(function, [x, row], [layout(cut), layout("-")], mesh(tp=2))
        for graph in (graph for part in run.cut.parts for graph in part.bodies.graphs):
            targets = [node.target for node in graph.nodes if node.op == "call_function"]
            assert targets.count(torch.ops.aten.clone.default) == copies
            (node,) = graph.find_nodes(op="call_function", target=expand)
            assert node.args[1] == sizes
