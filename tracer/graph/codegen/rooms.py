"""Compute rows in the memory that has room behind them, instead of copying them there.

A body on a host copies large values at the speed of memory. The operator's form with `out` computes
rows in their place. The place is contiguous, so that the form gives the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ...method.experts.expert_products import GROUPED_MM
from ...method.experts.rows_by_expert import WITH_ROOM
from ...method.node_memory import memory_of
from ...values.operators import written_values


@dataclass(frozen=True)
class Room:
    """The memory in which rows are computed.

    Attributes:
        node: the value that has the memory; its own operator does not run.
        opening: the statement that makes the memory.
        form: the form of the rows' operator that writes to memory.
        argument: the argument of that form, in the source.
    """

    node: fx.Node
    opening: str
    form: torch._ops.OpOverload
    argument: str


def rooms_of(graph: fx.Graph, constants: Collection[fx.Node]) -> Mapping[fx.Node, Room]:
    """The rooms of a graph, by the rows that are computed in them.

    Args:
        graph: the graph.
        constants: nodes whose values are known, which have no names in the source.
    """
    places = {node: number for number, node in enumerate(graph.nodes)}
    written = {
        memory_of(value)
        for node in graph.nodes
        if node.op == "call_function"
        for value in written_values(node.target, node.args, node.kwargs)
        if isinstance(value, fx.Node)
    }
    rooms: dict[fx.Node, Room] = {}
    for node in graph.find_nodes(op="call_function", target=WITH_ROOM):
        rows, order, count = node.args
        assert isinstance(rows, fx.Node)
        assert isinstance(order, fx.Node)
        form, like = _writing_form(rows), _like(rows, constants)
        if (
            form is None
            or like is None
            or rows in rooms
            or places[order] > places[rows]
            or {*constants} & {rows, order}
            or {memory_of(rows), memory_of(node)} & written
        ):
            continue
        shape = ", ".join(map(str, (count, *rows.meta["val"].shape[1:])))
        opening = f"{node.name} = {like.name}.new_empty(({shape},)); "
        name = form._schema.arguments[-1].name
        rooms[rows] = Room(node, opening, form, f"{name}={node.name}[: len({order.name})]")
    return rooms


def _like(rows: fx.Node, constants: Collection[fx.Node]) -> fx.Node | None:
    """An operand of the rows' type and device, if they are contiguous in memory of a host."""
    value = rows.meta["val"]
    if value.device.type != "cpu" or not value.is_contiguous():
        return None
    for operand in rows.all_input_nodes:
        fake = operand.meta["val"]
        if operand not in constants and (fake.dtype, fake.device) == (value.dtype, value.device):
            return operand
    return None


def _writing_form(rows: fx.Node) -> torch._ops.OpOverload | None:
    """The form of the operator of rows that takes the same arguments, and a tensor to write to."""
    target = rows.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if target is not GROUPED_MM and torch.Tag.pointwise not in target.tags:
        return None
    return _with_out(target)


@functools.cache
def _with_out(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    packet = target._overloadpacket
    taken = [(a.name, str(a.type)) for a in target._schema.arguments]
    for name in packet.overloads():  # type: ignore[no-untyped-call]
        form: torch._ops.OpOverload = getattr(packet, name)
        *arguments, last = form._schema.arguments
        if last.is_out and [(a.name, str(a.type)) for a in arguments] == taken:
            return form
    return None
