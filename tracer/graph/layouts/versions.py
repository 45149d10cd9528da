"""A graph with layouts: the versions of its values, and the transfers between these."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ....ir.layout import Cut, Layout, Region
from ....ir.location import Location
from ....ir.types import Place, TensorType
from ...values.specs import ir_dtype
from .cases import Answer, ExpertRows, Results
from .change import Change


@dataclass(frozen=True)
class Version:
    """A value in one of its layouts.

    Attributes:
        node: the node that computes the value.
        layout: the layout of this version.
        rows: the rows that ranks hold; what is in others is not defined. None: all.
    """

    node: fx.Node
    layout: Layout
    rows: ExpertRows | None = None


@dataclass(frozen=True)
class RowTransfer:
    """The rows that travel in a transfer: those that a rank needs, or has a summand of.

    Attributes:
        ids: the ids that say which do, in the layout in which ranks have them.
        experts: the experts of each rank of the place.
        lead: as in `ExpertRows`.
    """

    ids: Version
    experts: tuple[Region, ...]
    lead: int


@dataclass(frozen=True)
class LayoutTransfer:
    """A change of a value's layout.

    Attributes:
        before, after: the value in its old layout, and in the new one.
        change: the work that the transfer takes.
        rows: the rows that travel; None: all.
        why: the form of an op that it is part of, and the reason for it, if there were others.
    """

    before: Version
    after: Version
    change: Change
    rows: RowTransfer | None = None
    why: str = ""

    @property
    def takes(self) -> tuple[Version, ...]:
        """The versions that it takes."""
        return (self.before,) if self.rows is None else (self.before, self.rows.ids)


@dataclass(frozen=True)
class OwnRows:
    """The rows of a value that a rank holds in the order of its experts, and no others.

    Attributes:
        ids: the numbers of the experts of its rows, which are its first two dimensions.
        experts: how many experts there are.
        cut: how they are cut over ranks.
    """

    ids: Version
    experts: int
    cut: Cut


@dataclass(frozen=True)
class End:
    """The layout in which an output of the graph ends.

    Attributes:
        layout: has its cuts; None: the cuts that propagation gives it.
        summands: whether it may stay a sum over ranks, along axes that do not cut it.
        is_asked: whether the user has asked for this layout, so that any transfer may make it.
        path: for the gradient of a parameter, the parameter's path, for messages; else empty.
    """

    layout: Layout | None = None
    summands: bool = False
    is_asked: bool = False
    path: str = ""


@dataclass(frozen=True)
class Propagation:
    """A graph with a layout for each value.

    Attributes:
        graph: a copy of the graph, with some ops replaced by their expansions.
        place: the ranks, and the axes of their mesh.
        copies: the nodes of the copy, by those of the original.
        layouts: the layouts of each node's results.
        answers: the answer of its rule for each op.
        reads: the versions that each op takes, in the order of its tensors.
        transfers: the transfers, in the order in which ops need them.
        outputs: the outputs of the graph; None for an output that is no tensor.
        locations: the user's line of each node.
        passing: versions that are gathered for one op; a backward gathers them again.
        own_rows: the values of which ranks hold the rows of their own experts alone.
    """

    graph: fx.Graph
    place: Place
    copies: Mapping[fx.Node, fx.Node]
    layouts: Mapping[fx.Node, Results]
    answers: Mapping[fx.Node, Answer]
    reads: Mapping[fx.Node, tuple[Version, ...]]
    transfers: tuple[LayoutTransfer, ...]
    outputs: tuple[Version | None, ...]
    locations: Mapping[fx.Node, Location]
    passing: frozenset[Version] = frozenset()
    own_rows: Mapping[fx.Node, OwnRows] = field(default_factory=dict)

    def layout(self, node: fx.Node) -> Layout:
        """The layout in which a node of the copied graph computes its tensor."""
        (layout,) = self.layouts[node]
        assert layout is not None
        return layout

    def rows_of(self, version: Version) -> OwnRows | None:
        """The rows of a version that a rank holds, if these are those of its experts alone."""
        return self.own_rows.get(version.node)

    def rows_text(self, version: Version, names: Mapping[fx.Node, str]) -> str:
        """The result of `rows_of` in words; `names` are those of nodes."""
        own = self.rows_of(version)
        if own is None:
            return ""
        ids = names.get(own.ids.node, own.ids.node.name)
        return f" own rows by {ids} {own.ids.layout} of {own.experts} cut along {own.cut}"


def text_of(version: Version) -> str:
    """A version in words, such as `%mm f32[8/dp,64|+tp]`."""
    fake = version.node.meta["val"]
    layout = version.layout if version.layout.axes else None
    type_ = TensorType(ir_dtype(fake.dtype), tuple(fake.shape), None, layout)
    return f"%{version.node.name} {type_}"


def text_of_cuts(layout: Layout) -> str:
    """The cuts of a layout as a plan writes them, such as `cg.cut(0, "dp")`."""
    texts = []
    for dim, cut in enumerate(layout.cuts):
        axes = "".join(f', "{axis}"' for axis in cut.axes)
        blocks = f", blocks={cut.blocks}" if cut.blocks > 1 else ""
        blocks += ', order="zigzag"' if cut.zigzag else ""
        texts += [f"cg.cut({dim}{axes}{blocks})"] if cut else []
    return " & ".join(texts) or "cg.whole"


def rewire(
    reads: Mapping[fx.Node, Sequence[Version]],
    values: Container[fx.Node],
    output: fx.Node,
    outputs: Iterable[Version | None],
) -> None:
    """Let each node take the nodes of the versions that it reads; the nodes are changed in place.

    Args:
        reads: the versions that each op reads, in the order of its tensors.
        values: the nodes that have versions.
        output: the output node of the graph.
        outputs: the versions that it gives; None for an output that is no tensor.
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
