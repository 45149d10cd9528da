"""The graph that one rank runs for a part: the part's ops on the rank's pieces.

Sizes in arguments become the sizes of the pieces. Fakes of the pieces are computed as well, so an
op whose pieces contradict its layouts fails here, and not when it runs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .....ir.layout import Layout, Position, Region, overlap, shape_of, within
from .....ir.layout import whole as whole_region
from .....ir.location import Location
from ....values.operators import storage_key
from ...autodiff.subgraphs import is_view
from ..cases import Answer, Shape
from ..cuts import unmerged
from ..expansions import fake_mode_of
from ..versions import Propagation, Version
from .row_graphs import RowGraph

_ATEN = torch.ops.aten
_VIEWS = frozenset({_ATEN.view.default, _ATEN._unsafe_view.default})


def build(
    propagation: Propagation,
    position: Position,
    inputs: Sequence[Version],
    nodes: Sequence[fx.Node],
    outputs: Sequence[Version],
) -> fx.Graph:
    """The graph of some nodes for a rank.

    A dimension that is a product of cut factors comes in and goes out as its factors (`unmerged`).

    Args:
        propagation: the graph that has the nodes, with its layouts.
        position: the rank's coordinates on the mesh.
        inputs: the values of the placeholders, in order; their pieces are contiguous.
        nodes: the nodes, in the order of the graph.
        outputs: the values that the graph returns as a tuple, in order.

    Returns:
        The graph. `meta["loc"]` of its nodes is the user's line of the op that they stem from.
    """
    builder = LocalGraphBuilder(propagation, position)
    for version in inputs:
        builder.placeholder(version)
    for node in nodes:
        builder.add(node)
    builder.graph.output(tuple(builder.given_out(version) for version in outputs))
    for node in reversed(builder.graph.nodes):
        if not node.users and node.op == "call_function" and is_view(node):
            builder.graph.erase_node(node)  # an expansion of which parts alone are used
    return builder.graph


class LocalGraphBuilder:
    """Makes the graph of one rank."""

    def __init__(self, propagation: Propagation, position: Position) -> None:
        self.graph = fx.Graph()
        self.position = position
        self._propagation = propagation
        self._values: dict[Version, Any] = {}
        self._tuples: dict[fx.Node, Any] = {}
        self._mode = fake_mode_of(node.meta.get("val") for node in propagation.graph.nodes)
        self._before = {t.after: t.before for t in propagation.transfers}
        self._loc: Location | None = None
        self._rows = RowGraph(self, propagation)

    def placeholder(self, version: Version) -> None:
        node = version.node
        name = node.name if node.name.isidentifier() else f"v_{node.name}"
        taken = {placeholder.target for placeholder in self.graph.find_nodes(op="placeholder")}
        while name in taken:  # by another layout of the value, or by a value of such a name
            name = f"{name}_{len(self._values)}"
        new = self.graph.placeholder(name)
        layout, shape = unmerged(version.layout, tuple(node.meta["val"].shape))
        with self._mode:
            new.meta["val"] = node.meta["val"].new_empty(
                shape_of(layout.region(shape, self.position))
            )
        if self._propagation.rows_of(version) is not None:
            self._rows.arrive(version, new)
            return
        self._values[version] = self._shaped(new, shape_of(self.region(version)))

    def given_out(self, version: Version) -> fx.Node:
        """The node of a version in the shape that other parts and ranks take.

        Its cut factors are separate dimensions, since no type has a product of them.
        """
        if self._propagation.rows_of(version) is not None:
            return self._rows.leave(version)
        layout, shape = unmerged(version.layout, tuple(version.node.meta["val"].shape))
        return self._shaped(self.value(version), shape_of(layout.region(shape, self.position)))

    def _shaped(self, node: fx.Node, shape: Shape) -> fx.Node:
        if tuple(node.meta["val"].shape) == shape:
            return node
        return self.emit(_ATEN.view.default, (node, list(shape)), {})

    def region(self, version: Version) -> Region:
        """The region of a version that the rank holds."""
        return version.layout.region(tuple(version.node.meta["val"].shape), self.position)

    def reads(self, node: fx.Node) -> tuple[Version, ...]:
        """The versions that an op takes."""
        return self._propagation.reads[node]

    def answer(self, node: fx.Node) -> Answer:
        """The answer of an op's rule."""
        return self._propagation.answers[node]

    def value(self, version: Version) -> fx.Node:
        """The node of the rank's piece of a version; a slice of another version's where needed."""
        piece = self._values.get(version)
        if piece is None:
            if self._propagation.rows_of(version) is not None:
                piece = self._rows.all_rows(version)
            elif version.node.op == "get_attr" and version.layout == self._layouts(version.node)[0]:
                piece = self.graph.node_copy(version.node)
            else:
                before = self._before[version]
                held, region = self.region(before), self.region(version)
                piece = self.piece(self.value(before), within(overlap(region, held), held))
            self._values[version] = piece
        return piece

    def add(self, node: fx.Node) -> None:
        """Add the rank's form of an op."""
        self._loc = self._propagation.locations.get(node)
        if node.op == "get_attr":
            return
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            self._note(node, self._item(source, index))
            return
        op = RankOp(self, node, self.value)
        answer = self._propagation.answers[node]
        summed = self._rows.sums(node, op)
        layouts = [*answer.wanted, *(layout for layout in answer.results if layout is not None)]
        result: Any
        if node in self._propagation.own_rows:
            result = self._rows.add(node, lambda value: RankOp(self, node, value))
        elif summed is not None:
            result = summed
        elif not any(cut for layout in layouts for cut in layout.cuts):
            result = op.run()
        elif answer.local is not None:
            result = answer.local(op)
        else:
            result = op.run(**{name: op.size(index) for name, index in answer.sizes.items()})
        if isinstance(node.meta["val"], torch.Tensor):
            self._note(node, result)
        else:
            self._tuples[node] = result

    def _layouts(self, node: fx.Node) -> Sequence[Layout | None]:
        return self._propagation.layouts[node]

    def _item(self, source: fx.Node, index: Any) -> fx.Node:
        results = self._tuples[source]
        if isinstance(results, tuple):
            item = results[index]
            assert isinstance(item, fx.Node)
            return item
        return self.emit(operator.getitem, (results, index), {})

    def _note(self, node: fx.Node, result: fx.Node) -> None:
        (layout,) = self._layouts(node)
        fake = result.meta["val"]
        if not isinstance(fake, torch.Tensor):
            return
        assert layout is not None
        version = Version(node, layout)
        shape = shape_of(self.region(version))
        is_rows = node in self._propagation.own_rows
        if is_rows:
            shape = (math.prod(shape[:2]), *shape[2:])
        assert tuple(fake.shape) == shape, f"{node.format_node()}: {tuple(fake.shape)}, not {shape}"
        dtype = node.meta["val"].dtype
        if fake.dtype is not dtype:  # the local form of a rule may compute in another type
            result = self.emit(_ATEN._to_copy.default, (result,), {"dtype": dtype})
        if is_rows:
            self._rows.note(version, result)
        else:
            self._values[version] = result

    def emit(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
        """Add an op, and compute its fake."""
        if target in _VIEWS and not self._is_viewable(*args):
            args = (self._contiguous(args[0]), *args[1:])
        node = self.graph.call_function(target, args, dict(kwargs))
        if self._loc is not None:
            node.meta["loc"] = self._loc
        fakes, named = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self._mode:
            node.meta["val"] = target(*fakes, **named)
        return node

    def _is_viewable(self, node: fx.Node, shape: Sequence[int]) -> bool:
        """True if a piece can be viewed in a shape; its strides may differ from the whole's."""
        fake = node.meta["val"]
        with self._mode:
            return storage_key(fake.reshape(shape)) == storage_key(fake)

    def _contiguous(self, node: fx.Node) -> fx.Node:
        return self.emit(_ATEN.clone.default, (node,), {"memory_format": torch.contiguous_format})

    def piece(self, node: fx.Node, region: Region) -> fx.Node:
        """A region of a tensor, with memory of its own unless it repeats a smaller one."""
        shape = tuple(node.meta["val"].shape)
        if region == whole_region(shape):
            return node
        if self._is_repeated(node, region):
            return self.emit(_ATEN.expand.default, (node.args[0], list(shape_of(region))), {})
        for dim, (intervals, size) in enumerate(zip(region, shape, strict=True)):
            if intervals == (((0, size),) if size else ()):
                continue
            parts = [
                self.emit(_ATEN.slice.Tensor, (node, dim, start, stop), {})
                for start, stop in intervals or ((0, 0),)
            ]
            node = parts[0] if len(parts) == 1 else self.emit(_ATEN.cat.default, (parts, dim), {})
        if node.target is _ATEN.slice.Tensor:
            node = self._contiguous(node)
        return node

    def _is_repeated(self, node: fx.Node, region: Region) -> bool:
        """True if a tensor is expanded along all dimensions of which the region has a part."""
        source = node.args[0] if node.target is _ATEN.expand.default else None
        if not isinstance(source, fx.Node):
            return False
        shape = tuple(node.meta["val"].shape)
        sizes = tuple(source.meta["val"].shape)
        sizes = (*(1,) * (len(shape) - len(sizes)), *sizes)
        dims = zip(region, whole_region(shape), sizes, strict=True)
        return all(held == whole or size == 1 for held, whole, size in dims)


@dataclass(frozen=True)
class RankOp:
    """An op as one rank runs it; implements `LocalOp`.

    Attributes:
        builder: makes the rank's graph.
        node: the op.
        value: gives the node of the rank's piece of a version that the op takes.
    """

    builder: LocalGraphBuilder
    node: fx.Node
    value: Callable[[Version], fx.Node]

    @property
    def target(self) -> torch._ops.OpOverload:
        target = self.node.target
        assert isinstance(target, torch._ops.OpOverload)
        return target

    @property
    def arguments(self) -> Mapping[str, Any]:
        """All arguments of the op by name, with nodes of the rank's graph."""
        reads = iter(self.builder.reads(self.node))
        arguments = {}
        for index, argument in enumerate(self.target._schema.arguments):
            args, kwargs = self.node.args, self.node.kwargs
            default = argument.default_value
            value = args[index] if index < len(args) else kwargs.get(argument.name, default)
            arguments[argument.name] = fx.node.map_arg(value, lambda _: self.value(next(reads)))
        return arguments

    @property
    def operands(self) -> tuple[Region, ...]:
        reads = self.builder.reads(self.node)[: len(self._answer.wanted)]  # without ids of rows
        return tuple(map(self.builder.region, reads))

    @property
    def results(self) -> tuple[Region | None, ...]:
        position = self.builder.position
        pairs = zip(self._answer.results, self.shapes, strict=True)
        return tuple(
            None if layout is None or shape is None else layout.region(shape, position)
            for layout, shape in pairs
        )

    @property
    def shapes(self) -> tuple[Shape | None, ...]:
        return tuple(tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in self.fakes)

    @property
    def fakes(self) -> tuple[Any, ...]:
        val = self.node.meta["val"]
        return tuple(val) if isinstance(val, (tuple, list)) else (val,)

    def size(self, index: int) -> list[int]:
        """The shape of the rank's piece of a result."""
        region = self.results[index]
        assert region is not None
        return list(shape_of(region))

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.builder.emit(target, args, kwargs)

    def run(self, /, **changed: Any) -> fx.Node:
        arguments = {**self.arguments, **changed}
        positional_count = len(self.node.args)
        names = [argument.name for argument in self.target._schema.arguments]
        args = tuple(arguments[name] for name in names[:positional_count])
        kwargs = {
            n: arguments[n] for n in names[positional_count:] if n in {*self.node.kwargs, *changed}
        }
        return self.builder.emit(self.target, args, kwargs)

    def piece(self, node: fx.Node, region: Region) -> fx.Node:
        return self.builder.piece(node, region)

    @property
    def _answer(self) -> Answer:
        return self.builder.answer(self.node)
