"""Find the values of which a rank needs no rows but those of its own experts.

A routed value is zero on a rank, but for the rows of the rank's experts. On a host, a rank holds
these rows alone, in the order of its experts, where nothing else asks for the value: no transfer
and no output of the graph. So products sort ids once, ops between them compute no zeros, and a
backward takes what a forward has saved without sorting it again. A rank holds so as well what only
its own experts' products take, such as the gradients of tokens times their shares.

A device would have to tell the host how many rows there are, so there all rows are held.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import fx

from ....method.experts.expert_products import EXPERT_LINEAR, EXPERT_OUTER
from ....method.node_memory import memory_of
from ....values.operators import argument_of, written_values
from ..rules.pointwise import is_pointwise
from ..versions import OwnRows, Propagation, Version

_ATEN = torch.ops.aten
ALONG_DIM = frozenset(
    {
        *(_ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.slice.Tensor),
        *(_ATEN.cat.default, _ATEN.sum.dim_IntList),
    }
)
"""Ops that keep the rows of a value if their `dim` is none of rows."""

_ENTRYWISE = frozenset({_ATEN._to_copy.default, _ATEN.alias.default, _ATEN.detach.default})
"""Ops that work entry by entry without torch's tag."""


def with_own_rows(run: Propagation) -> Propagation:
    """The propagation with the values of which ranks hold their own rows, on hosts.

    An op that takes or gives such a value takes the ids as well, behind its operands.
    """
    own_rows = _OwnRowsSearch(run).all()
    if not own_rows:
        return run
    reads = dict(run.reads)
    for node, versions in run.reads.items():
        rows = [own_rows[node]] if node in own_rows else []
        rows += [own_rows[version.node] for version in versions if version.node in own_rows]
        ids = dict.fromkeys(own.ids for own in rows)
        reads[node] = (*versions, *(version for version in ids if version not in versions))
    return replace(run, reads=reads, own_rows=own_rows)


class _OwnRowsSearch:
    """Searches one graph."""

    def __init__(self, run: Propagation) -> None:
        self._run = run
        self._whole = {transfer.before for transfer in run.transfers}
        self._whole |= {version for version in run.outputs if version is not None}
        self._written = {
            memory_of(value)
            for node in run.graph.nodes
            if node.op == "call_function"
            for value in written_values(node.target, node.args, node.kwargs)
            if isinstance(value, fx.Node)
        }
        self._known: dict[fx.Node, OwnRows] = {}

    def all(self) -> Mapping[fx.Node, OwnRows]:
        for node in self._run.graph.nodes:
            rows = self._rows(node)
            if rows is not None:
                self._known[node] = rows
        for node in reversed(self._run.graph.nodes):
            rows = self._rows_of_uses(node)
            if rows is not None:
                self._known[node] = rows
        return self._known

    def _rows_of_uses(self, node: fx.Node) -> OwnRows | None:
        """The rows of an op of entries, if all that takes its value are products of these rows."""
        is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
        if node in self._known or node not in self._run.answers or not is_tensor:
            return None
        taken = {self._rows_of_product(node, use) for use in node.users}
        rows = taken.pop() if len(taken) == 1 else None
        if rows is None or not self._may(node):
            return None
        assert isinstance(node.target, torch._ops.OpOverload)
        return rows if is_pointwise(node.target) and self._keeps_rows(node, rows) else None

    def _rows_of_product(self, node: fx.Node, use: fx.Node) -> OwnRows | None:
        """The rows of which a rank multiplies a value with its experts, or None if of others."""
        if use.target is EXPERT_LINEAR:
            is_rows = node not in [version.node for version in self._run.reads[use][1:]]
            return self._known.get(use) if is_rows else None
        if use.target is not EXPERT_OUTER:
            return None
        *factors, ids = self._run.reads[use][:3]
        others = [version.node for version in factors if version.node is not node]
        rows = self._known.get(others[0]) if len(others) == 1 else None
        if rows is None or ids.node is node:
            return None
        return rows if (ids, self._run.layout(use).cuts[0]) == (rows.ids, rows.cut) else None

    def _rows(self, node: fx.Node) -> OwnRows | None:
        if node.target is operator.getitem:
            source = node.args[0]
            return self._known.get(source) if isinstance(source, fx.Node) else None
        answer = self._run.answers.get(node)
        if answer is None or answer.routing is None or not all(map(self._may, _tensors(node))):
            return None
        routing = answer.routing
        if node.target is EXPERT_LINEAR:
            ids = self._run.reads[node][2]
            rows = OwnRows(ids, routing.experts, routing.cut)
            return rows if ids.node is routing.ids and self._is_held(rows) else None
        taken = {self._known.get(version.node) for version in self._run.reads[node]}
        known = [rows for rows in taken if rows is not None]
        if len(known) != 1 or not self._keeps_rows(node, known[0]):
            return None
        is_same = (routing.ids, routing.cut) == (known[0].ids.node, known[0].cut)
        return known[0] if is_same and routing.dims == (0, 1) else None

    def _may(self, node: fx.Node) -> bool:
        """True if ranks may hold a value in part: nothing else takes it, or writes to it."""
        fake = node.meta["val"]
        return (
            fake.device.type == "cpu"
            and fake.dim() > 2
            and Version(node, self._run.layout(node)) not in self._whole
            and memory_of(node) not in self._written
        )

    def _is_held(self, rows: OwnRows) -> bool:
        """True if each rank has experts one behind the other, and nothing writes to the ids."""
        place = self._run.place
        pieces = (rows.cut.piece(rows.experts, place.position(rank)) for rank in place.ranks)
        return memory_of(rows.ids.node) not in self._written and all(len(p) == 1 for p in pieces)

    def _keeps_rows(self, node: fx.Node, rows: OwnRows) -> bool:
        """True if an op computes each row of its results of the same row of its operands."""
        run, answer, target = self._run, self._run.answers[node], node.target
        assert isinstance(target, torch._ops.OpOverload)
        layouts = [layout for layout in run.layouts[node] if layout is not None]
        if answer.sizes or any(layout.cuts[:2] != rows.ids.layout.cuts for layout in layouts):
            return False
        shapes = [tuple(version.node.meta["val"].shape) for version in run.reads[node]]
        results = [tuple(value.meta["val"].shape) for value in _tensors(node)]
        if target in ALONG_DIM:
            dims = argument_of(target, node.args, node.kwargs, "dim")
            every = [dims] if isinstance(dims, int) else list(dims or ())
            is_inner = bool(every) and all(dim % len(shapes[0]) > 1 for dim in every)
            is_inner = is_inner and not any(any(layout.cuts[2:]) for layout in layouts)
            is_inner = is_inner and not any(any(v.layout.cuts[2:]) for v in run.reads[node])
            return is_inner and all(shape[:2] == results[0][:2] for shape in shapes)
        is_entrywise = is_pointwise(target) or target in _ENTRYWISE
        if not is_entrywise or answer.local is not None:
            return False
        return all(_fits(shape, results[0]) for shape in shapes)


def _tensors(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes of an op's results: its own, or those of the items that are taken of it."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        yield node
    else:
        yield from (user for user in node.users if user.target is operator.getitem)


def lead_of(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The sizes of an operand along the two dimensions of rows of a result with `rank`."""
    return shape[: max(len(shape) - rank + 2, 0)]


def _fits(shape: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """True if the rows of an operand can be taken as those of the result are."""
    lead = lead_of(shape, len(result))
    return (
        not lead
        or all(size == 1 for size in lead)
        or (len(lead) == 2 and lead[0] == result[0] and lead[1] in (1, result[1]))
    )
