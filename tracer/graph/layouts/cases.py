"""The input of a layout rule, an op with the layouts of its operands; and its output, an answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import fx

from ....ir.layout import WHOLE, Cut, Layout, Region
from ....ir.location import Location
from ...errors import TraceError

Shape: TypeAlias = tuple[int, ...]

Results: TypeAlias = tuple[Layout | None, ...]
"""Layouts of an op's results; None for a result that is no tensor."""


class LayoutError(TraceError):
    """The values of a method cannot be laid out over the ranks of a mesh as its plan asks."""

    __module__ = "cg"  # the public name, which tracebacks show


@dataclass(frozen=True)
class Routing:
    """The rank that has each row of a value, where that depends on data.

    Experts are cut over the ranks along some axes, and each row is of one expert. The rank that has
    the expert has the row as its summand. The summands of the other ranks are zeros there.

    Attributes:
        ids: the value that has the number of the expert of each row.
        experts: how many there are.
        cut: how they are cut over ranks.
        dims: the dimensions of the value that are those of `ids`, in order.
    """

    ids: fx.Node
    experts: int
    cut: Cut
    dims: tuple[int, ...]


@dataclass(frozen=True)
class ExpertRows:
    """The rows of a value that have one of a rank's experts among their ids.

    Attributes:
        ids: the value that has the numbers of experts, `[rows, choices]`.
        experts: how many experts there are.
        cut: how they are cut over ranks.
        lead: how many leading dimensions of the value are its rows; these are in the order of the
            rows of `ids`, or of its entries.
    """

    ids: fx.Node
    experts: int
    cut: Cut
    lead: int

    def fits(self, shape: Shape) -> bool:
        """True if a value of a shape has a row for each row of the ids, or for each entry."""
        ids = tuple(self.ids.meta["val"].shape)
        rows = math.prod(shape[: self.lead])
        return len(ids) == 2 and rows in (ids[0], math.prod(ids))


@dataclass(frozen=True)
class Operand:
    """A tensor that an op takes.

    Attributes:
        node: the node that computes it.
        shape: the shape of the logical tensor.
        dtype: the type of its elements.
        layout: its layout.
        routing: the ranks that have its rows, if it is a sum over them.
        is_weight: whether it follows from weights alone.
        is_gradient: whether it follows from a cotangent.
    """

    node: fx.Node
    shape: Shape
    dtype: torch.dtype
    layout: Layout
    routing: Routing | None = None
    is_weight: bool = False
    is_gradient: bool = False

    @property
    def cuts(self) -> tuple[Cut, ...]:
        return self.layout.cuts

    @property
    def is_floating(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex


@dataclass(frozen=True)
class Case:
    """An op, and the layouts of its operands.

    Attributes:
        target: the op.
        arguments: all of its arguments by name, with an `Operand` for each tensor.
        operands: the tensors in the order of the arguments.
        shapes: the shapes of the results; None for a result that is no tensor.
        sizes: the sizes of the mesh's axes, in the order of the mesh.
        asked: cuts that a user of the first result asks for, in dimensions that the answer left
            free.
        loc: the user's line.
        stays_a_sum: whether the result is a term of gradients alone, which may be summands.
        attention: the form of attention that the plan asks for; None: the best one.
        sequence: axes that cut tokens between layers whose weights they cut.
        end: the cuts in which the result ends if it is a gradient of state; None: it is none.
    """

    target: torch._ops.OpOverload
    arguments: Mapping[str, Any]
    operands: tuple[Operand, ...]
    shapes: tuple[Shape | None, ...]
    sizes: Mapping[str, int]
    asked: tuple[Cut, ...] | None = None
    loc: Location | None = None
    stays_a_sum: bool = False
    attention: str | None = None
    sequence: frozenset[str] = frozenset()
    end: tuple[Cut, ...] | None = None

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def name(self) -> str:
        """The op in words, such as `aten.mm`."""
        return str(self.target).removesuffix(".default")

    def shape(self, index: int = 0) -> Shape:
        """The shape of a result that is a tensor."""
        shape = self.shapes[index]
        assert shape is not None
        return shape

    def has_cut(self, operand: Operand | None, *dims: int) -> bool:
        """True if one of these dimensions of an operand is cut."""
        return operand is not None and any(operand.cuts[dim] for dim in dims)

    def error(self, reason: str, remedy: str) -> LayoutError:
        return LayoutError(f"{self.name}: {reason}", loc=self.loc, remedy=remedy)


class LocalOp(Protocol):
    """An op as one rank runs it; a rule's `Local` takes it.

    Attributes:
        target: the op.
        arguments: its arguments by name, with a node of the rank's graph for each tensor.
        operands: the regions of the operands that the rank holds.
        results: the regions of the results that the rank computes; None for a result that is no
            tensor.
        shapes: the shapes of the whole results.
        fakes: the fakes of the whole results.
    """

    @property
    def target(self) -> torch._ops.OpOverload: ...
    @property
    def arguments(self) -> Mapping[str, Any]: ...
    @property
    def operands(self) -> tuple[Region, ...]: ...
    @property
    def results(self) -> tuple[Region | None, ...]: ...
    @property
    def shapes(self) -> tuple[Shape | None, ...]: ...
    @property
    def fakes(self) -> tuple[Any, ...]: ...

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add an op to the rank's graph."""
        ...

    def run(self, /, **changed: Any) -> fx.Node:
        """Add the op itself, with some arguments changed."""
        ...

    def piece(self, node: fx.Node, region: Region) -> fx.Node:
        """A region of a whole tensor, with memory of its own."""
        ...


Local: TypeAlias = Callable[[LocalOp], Any]
"""Adds the nodes that a rank runs for an op. Gives the node of its result or of the tuple of its
results, or a tuple of nodes."""


@dataclass(frozen=True)
class Answer:
    """The layouts of an op's operands and results, and the op that each rank runs.

    Attributes:
        wanted: the layout in which the op takes each operand.
        results: the layout of each result.
        sizes: names of arguments that are the shape of a result, with the result's index; on a
            rank, they become the shape of its piece.
        local: what a rank runs instead of the op; None: the op.
        free: dimensions of the first result that could be cut at no cost, if asked for.
        reasons: why the op cannot take some operands in their layouts, by index.
        is_asked: whether the user has asked for the layouts, so that any transfer may make them.
        dispatched: operands that any transfer may bring to the ranks that need them, since the plan
            has cut experts or sequences; with the rows of experts that these need; None: all.
        routing: the ranks that have the rows of the results, which all are sums over them.
        summed: the rows in which a rank's summand of each result is not zero.
        is_late: whether the op begins behind the start of all exchanges that could begin with it,
            so that they go on while it computes. Its `dispatched` operands then also travel on
            behind the part ahead of it, and not before.
        passing: operands that are gathered for this op; a backward that takes them gathers again.
        why: the reason for it in words, if there were others.
    """

    wanted: tuple[Layout, ...]
    results: Results
    sizes: Mapping[str, int] = field(default_factory=dict)
    local: Local | None = None
    free: frozenset[int] = frozenset()
    reasons: Mapping[int, str] = field(default_factory=dict)
    is_asked: bool = False
    dispatched: Mapping[int, ExpertRows | None] = field(default_factory=dict)
    routing: Routing | None = None
    summed: ExpertRows | None = None
    is_late: bool = False
    passing: frozenset[int] = frozenset()
    why: str = ""


@dataclass(frozen=True)
class Expansion:
    """The replacement of an op by several others at logical shapes.

    Attributes:
        function: takes the op's arguments by name, and gives its result, or the tuple of them.
        asked: cuts for the results of some ops in it, so that no rank computes these whole.
        why: the reason for it in words, if there were others.
    """

    function: Callable[..., Any]
    asked: Mapping[torch._ops.OpOverload, tuple[Cut, ...]] = field(default_factory=dict)
    why: str = ""


Rule: TypeAlias = Callable[[Case], Answer | Expansion]


def whole(rank: int) -> Layout:
    """The layout of copies of a tensor with `rank` dimensions."""
    return Layout((WHOLE,) * rank)


def tensors(value: Any) -> Iterator[Operand]:
    """The operands in an argument, which may be a list of them, in order."""
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def dim_of(dim: int, rank: int) -> int:
    """A dimension, which may be negative, as a number from 0."""
    return dim % rank if rank else 0


def dims_of(dims: int | list[int] | None, rank: int) -> tuple[int, ...]:
    """Dimensions as numbers from 0, in order; all of them if `dims` is None or empty."""
    if dims is None or dims == []:
        return tuple(range(rank))
    dim_list = [dims] if isinstance(dims, int) else dims
    return tuple(sorted(dim_of(dim, rank) for dim in dim_list))


def shapes(
    target: torch._ops.OpOverload, val: Any, loc: Location | None
) -> tuple[Shape | None, ...]:
    """The shapes of an op's results; None for a result that is no tensor.

    Raises:
        LayoutError: a result is sparse.
    """
    results = val if isinstance(val, (tuple, list)) else (val,)
    if any(isinstance(v, torch.Tensor) and v.layout is not torch.strided for v in results):
        raise LayoutError(
            f"{target} gives a sparse tensor, which ranks of a mesh do not exchange",
            loc=loc,
            remedy="use dense gradients: nn.Embedding(..., sparse=False), and an optimizer for "
            "them, such as Adam instead of SparseAdam",
        )
    return tuple(tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in results)
