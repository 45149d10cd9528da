"""The ops of a rank's graph on the rows that the rank holds in the order of its experts.

In a rank's graph such a value is `[rows, ...]`. `own_rows` sorts the ids once. On a host, rows of
other experts are left out of the order, so a graph runs on fewer rows than its fakes have. Between
parts a value has its declared shape, with its rows in front, so types say nothing of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from .....ir.layout import Position, Region
from ....method.experts.expert_products import EXPERT_LINEAR, EXPERT_OUTER, GROUPED_MM
from ....method.experts.rows_by_expert import (
    FIRST_ROWS,
    OWN_ROWS,
    ROWS_BACK,
    SUMS_BY_TOKEN,
    WITH_ROOM,
)
from ....values.operators import argument_of
from ..cases import LocalOp, Shape
from ..rules.rows import first_entry
from ..versions import OwnRows, Propagation, Version
from .own_rows import ALONG_DIM, lead_of

_ATEN = torch.ops.aten


class _RowGraphBuilder(Protocol):
    """Makes the graph of a rank."""

    position: Position

    def emit(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node: ...
    def value(self, version: Version) -> fx.Node: ...
    def region(self, version: Version) -> Region: ...


class RowGraph:
    """Adds ops on a rank's own rows to its graph.

    Args:
        builder: makes the graph.
        propagation: the graph with layouts.
    """

    def __init__(self, builder: _RowGraphBuilder, propagation: Propagation) -> None:
        self._builder, self._run = builder, propagation
        self._rows: dict[Version, fx.Node] = {}
        self._arrived: dict[Version, fx.Node] = {}
        self._once: dict[tuple[Any, ...], Any] = {}

    def note(self, version: Version, rows: fx.Node) -> None:
        """Write down the rows of a version."""
        self._rows[version] = rows

    def arrive(self, version: Version, placeholder: fx.Node) -> None:
        """Write down an input that has the rows of a version in front."""
        self._arrived[version] = placeholder

    def leave(self, version: Version) -> fx.Node:
        """A version in its declared shape, with its rows in front."""
        if version in self._arrived:
            return self._arrived[version]
        rows, shape = self._rows[version], self._shape(version)
        order, _ = self._order(self._run.own_rows[version.node])
        room = self._emit(WITH_ROOM, rows, order, math.prod(shape[:2]))
        return self._emit(_ATEN.view.default, room, list(shape))

    def all_rows(self, version: Version) -> fx.Node:
        """A version with its rows in the order of ids, and zeros for rows of experts elsewhere."""
        answer = self._run.answers.get(version.node)
        assert answer is None or answer.routing is not None, "a product alone takes these rows"
        own, shape = self._run.own_rows[version.node], self._shape(version)
        order, ends = self._order(own)
        back = self._emit(ROWS_BACK, self._own(version), order, ends, math.prod(shape[:2]))
        return self._emit(_ATEN.view.default, back, list(shape))

    def sums(self, node: fx.Node, op: LocalOp) -> fx.Node | None:
        """The result of an op that adds up rows that are held in order; None for another op."""
        if self._is_outer(node):
            return self._outer(node, op)
        return self._sums_by_token(node) if self._adds_choices(node) else None

    def _adds_choices(self, node: fx.Node) -> bool:
        """True if an op adds up the rows of each token."""
        if node.target is not _ATEN.sum.dim_IntList or node in self._run.own_rows:
            return False
        dims, keeps, dtype = (
            argument_of(node.target, node.args, node.kwargs, name)
            for name in ("dim", "keepdim", "dtype")
        )
        (version, *_) = self._run.reads[node]
        answer, fake = self._run.answers[node], version.node.meta["val"]
        is_plain = not (keeps or dtype or answer.sizes or answer.local)
        is_known = self._run.rows_of(version) is not None and fake.is_floating_point()
        return is_plain and is_known and [dim % fake.dim() for dim in dims or ()] == [1]

    def _sums_by_token(self, node: fx.Node) -> fx.Node:
        (version, *_) = self._run.reads[node]
        own, count = self._run.own_rows[version.node], self._shape(version)[0]
        order, ends = self._tokens(own), self._order(own)[1]
        return self._emit(SUMS_BY_TOKEN, self._own(version), order, ends, count)

    def _is_outer(self, node: fx.Node) -> bool:
        """True if a node adds up products of rows of which some are held in order."""
        if node.target is not EXPERT_OUTER:
            return False
        *rows, ids = self._run.reads[node][:3]
        known = {self._run.rows_of(version) for version in rows} - {None}
        return len(known) == 1 and next(iter(known)).ids == ids  # type: ignore[union-attr]

    def _outer(self, node: fx.Node, op: LocalOp) -> fx.Node | None:
        """The sums of products over the rows of each expert; None if other experts are asked."""
        left, right, _ = self._run.reads[node][:3]
        own = self._run.rows_of(left) or self._run.rows_of(right)
        region = op.results[0]
        assert own is not None
        assert region is not None
        if region[0] != own.cut.piece(own.experts, self._builder.position):
            return None
        columns = self._emit(_ATEN.t.default, self._factor(left, own))
        return self._emit(GROUPED_MM, columns, self._factor(right, own), self._order(own)[1])

    def add(self, node: fx.Node, make: Callable[[Callable[[Version], fx.Node]], Any]) -> Any:
        """Add an op that gives rows of experts.

        Args:
            node: the op.
            make: gives the op for a rank, whose operands are what a function gives for versions.
        """
        own = self._run.own_rows[node]
        if node.target is EXPERT_LINEAR:
            rows, weight, _ = self._run.reads[node][:3]
            matrices = self._emit(_ATEN.transpose.int, self._builder.value(weight), 1, 2)
            return self._emit(GROUPED_MM, self._factor(rows, own), matrices, self._order(own)[1])
        rank = max(len(version.node.meta["val"].shape) for version in self._run.reads[node])
        op = make(lambda version: self._operand(version, own, rank))
        if node.target not in ALONG_DIM:
            return op.run()
        dims = op.arguments["dim"]
        inner = dims % rank - 1 if isinstance(dims, int) else [dim % rank - 1 for dim in dims]
        return op.run(dim=inner)

    def _factor(self, version: Version, own: OwnRows) -> fx.Node:
        """The rows of a factor of a product: those of tokens, or of tokens and choices."""
        if version.node in self._run.own_rows:
            return self._own(version)
        node = self._builder.value(version)
        return self._sorted(node, own, by_token=node.meta["val"].dim() == 2)

    def _operand(self, version: Version, own: OwnRows, rank: int) -> fx.Node:
        """An operand of an op that works on rows of a value with `rank` dimensions."""
        if version.node in self._run.own_rows:
            return self._own(version)
        node = self._builder.value(version)
        shape = _shape(node)
        lead = lead_of(shape, rank)
        if all(size == 1 for size in lead):
            return self._view(node, [1, *shape[2:]]) if len(lead) == 2 else node
        source = node.args[0] if node.target is _ATEN.expand.default else None
        if isinstance(source, fx.Node) and _shape(source) == (lead[0], 1, *shape[2:]):
            node = source  # one row for all choices of a token
        if _shape(node)[1] == 1:
            return self._sorted(self._view(node, [lead[0], *shape[2:]]), own, by_token=True)
        return self._sorted(node, own, by_token=False)

    def _sorted(self, node: fx.Node, own: OwnRows, *, by_token: bool) -> fx.Node:
        """The rows of a tensor in the order of experts."""

        def add() -> fx.Node:
            index, table = self._order(own)[0], node
            if by_token:
                index = self._tokens(own)
            else:
                shape = _shape(node)
                table = self._view(node, [math.prod(shape[:2]), *shape[2:]])
            return self._emit(_ATEN.index_select.default, table, 0, index)

        rows: fx.Node = self._first(("sorted", node, own, by_token), add)
        return rows

    def _own(self, version: Version) -> fx.Node:
        if version not in self._rows:
            shape = self._shape(version)
            rows = self._view(self._arrived[version], [math.prod(shape[:2]), *shape[2:]])
            order, _ = self._order(self._run.own_rows[version.node])
            self._rows[version] = self._emit(FIRST_ROWS, rows, order)
        return self._rows[version]

    def _order(self, own: OwnRows) -> tuple[fx.Node, fx.Node]:
        """The order of the rank's rows, and where those of each expert end in it."""

        def add() -> tuple[fx.Node, fx.Node]:
            ((first, last),) = own.cut.piece(own.experts, self._builder.position)
            place = first_entry(self._builder.region(own.ids))
            ids = self._builder.value(own.ids)
            both = self._emit(OWN_ROWS, ids, first, last - first, own.experts, place)
            return self._emit(operator.getitem, both, 0), self._emit(operator.getitem, both, 1)

        order: tuple[fx.Node, fx.Node] = self._first(("order", own), add)
        return order

    def _tokens(self, own: OwnRows) -> fx.Node:
        choices = _shape(self._builder.value(own.ids))[1]

        def add() -> fx.Node:
            return self._emit(_ATEN.floor_divide.default, self._order(own)[0], choices)

        tokens: fx.Node = self._first(("tokens", own), add)
        return tokens

    def _first(self, key: tuple[Any, ...], add: Callable[[], Any]) -> Any:
        if key not in self._once:
            self._once[key] = add()
        return self._once[key]

    def _shape(self, version: Version) -> Shape:
        return tuple(
            sum(stop - start for start, stop in dim) for dim in self._builder.region(version)
        )

    def _view(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        def add() -> fx.Node:
            return self._emit(_ATEN.view.default, node, list(shape))

        view: fx.Node = self._first(("view", node, tuple(shape)), add)
        return view

    def _emit(self, target: Any, *args: Any) -> fx.Node:
        return self._builder.emit(target, args, {})


def _shape(node: fx.Node) -> Shape:
    return tuple(node.meta["val"].shape)
