"""A graph with layouts: its values in their layouts, and the transfers between these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from ...ir.layout import Layout
from ...ir.location import Location
from ...ir.types import Place, TensorType
from ..step.specs import ir_dtype
from .cases import Answer, Results
from .change import Change


@dataclass(frozen=True)
class Version:
    """A value in one of its layouts.

    Attributes:
        node: computes the value.
        layout: of this version.
    """

    node: fx.Node
    layout: Layout


@dataclass(frozen=True)
class Transfer:
    """A change of a value's layout.

    Attributes:
        before, after: the value as it is, and as it is wanted.
        change: what it takes.
        user: the op that wanted it first; None for an output of the graph, or a pin.
    """

    before: Version
    after: Version
    change: Change
    user: fx.Node | None


@dataclass(frozen=True)
class End:
    """How an output of the graph is to be laid out.

    Attributes:
        layout: its cuts; None: as it comes.
        summands: whether it may stay a sum over ranks, along axes that do not cut it.
    """

    layout: Layout | None = None
    summands: bool = False


@dataclass(frozen=True)
class Propagation:
    """A graph with a layout for each value.

    Attributes:
        graph: a copy of the graph, with ops replaced by those that they were expanded to.
        place: the ranks, and the axes of their mesh.
        copies: the nodes that stand for those of the graph that was given.
        layouts: of the results of each node.
        answers: of the rules, for ops.
        reads: the versions that an op takes, in the order of its tensors.
        transfers: in the order in which they are wanted.
        outputs: of the graph; None for what is no tensor.
        locations: the user's line of each node.
    """

    graph: fx.Graph
    place: Place
    copies: Mapping[fx.Node, fx.Node]
    layouts: Mapping[fx.Node, Results]
    answers: Mapping[fx.Node, Answer]
    reads: Mapping[fx.Node, tuple[Version, ...]]
    transfers: tuple[Transfer, ...]
    outputs: tuple[Version | None, ...]
    locations: Mapping[fx.Node, Location]

    def layout(self, node: fx.Node) -> Layout:
        """The layout in which a node of the copied graph computes its tensor."""
        (layout,) = self.layouts[node]
        assert layout is not None
        return layout


def text_of(version: Version) -> str:
    """A version in words, such as `%mm f32[8/dp,64|+tp]`."""
    fake = version.node.meta["val"]
    layout = version.layout if version.layout.axes else None
    type_ = TensorType(ir_dtype(fake.dtype), tuple(fake.shape), None, layout)
    return f"%{version.node.name} {type_}"
