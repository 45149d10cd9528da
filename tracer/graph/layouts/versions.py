"""A graph with layouts: its values in their layouts, and the transfers between these."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ....ir.layout import Layout
from ....ir.location import Location
from ....ir.types import Place, TensorType
from ...values.specs import ir_dtype
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
    """The layout that an output of the graph is to have.

    Attributes:
        layout: its cuts; None: as it comes.
        summands: whether it may stay a sum over ranks, along axes that do not cut it.
        is_asked: whether the user has asked for this layout, so that any transfer may make it.
        path: of the parameter that it is the gradient of, for messages; empty where it is of none.
    """

    layout: Layout | None = None
    summands: bool = False
    is_asked: bool = False
    path: str = ""


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


def text_of_cuts(layout: Layout) -> str:
    """The cuts of a layout as a plan has them, such as `cg.cut(0, "dp")`."""
    texts = []
    for dim, cut in enumerate(layout.cuts):
        axes = "".join(f', "{axis}"' for axis in cut.axes)
        blocks = f", blocks={cut.blocks}" if cut.blocks > 1 else ""
        texts += [f"cg.cut({dim}{axes}{blocks})"] if cut else []
    return " & ".join(texts) or "cg.whole"


def rewire(
    reads: Mapping[fx.Node, Sequence[Version]],
    values: Container[fx.Node],
    output: fx.Node,
    outputs: Iterable[Version | None],
) -> None:
    """Let nodes take the copies of others that they read, in place.

    Args:
        reads: what ops read, in the order of their tensors.
        values: nodes that have versions.
        output: of the graph.
        outputs: what it gives; None for what is no tensor.
    """

    def taken(argument: Any, versions: Iterator[Version]) -> Any:
        return fx.node.map_arg(argument, lambda n: next(versions).node if n in values else n)

    for node, versions in reads.items():
        target, left = node.target, iter(versions)
        assert isinstance(target, torch._ops.OpOverload)
        args, kwargs = list(node.args), dict(node.kwargs)
        for index, argument in enumerate(target._schema.arguments):  # in the order of `reads`
            if index < len(args):
                args[index] = taken(args[index], left)
            elif argument.name in kwargs:
                kwargs[argument.name] = taken(kwargs[argument.name], left)
        node.args, node.kwargs = tuple(args), kwargs
    output.args = taken(output.args, (version for version in outputs if version is not None))
