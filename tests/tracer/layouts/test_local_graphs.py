"""The graph that one rank runs for a part."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from cg.ir.layout import Layout
from cg.tracer.graph.layouts.propagation.local_graphs import LocalGraphBuilder
from cg.tracer.graph.layouts.versions import Version

from .simulation import layout, mesh, simulate


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
