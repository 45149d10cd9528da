"""Compute rows in the memory that has room behind them, instead of copying them there.

A body on a host copies large values at the speed of memory. The operator's form with `out` computes
rows in their place. The place is contiguous, so that the form gives the same bits. A product with
experts has as many rows as it takes, and computes none behind the last expert: if the rows that it
takes have room behind them, so have its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

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
        name: its name in the source.
        order: the order of the rows, which has as many entries.
        like: what has the type and the device of the memory.
        shape: the shape of the memory.
        form: the form of the rows' operator that writes to memory.
        takes: for a product, the memory that it takes in the place of its rows; else empty. The
            memory of the product is then its own result.
        is_last: whether nothing takes that memory behind it.
    """

    name: str
    order: fx.Node
    like: fx.Node
    shape: tuple[int, ...]
    form: torch._ops.OpOverload
    takes: str = ""
    is_last: bool = False

    def statement(self, rows: str, call: Callable[[list[str]], str]) -> str:
        """The source that computes rows.

        Args:
            rows: their name.
            call: writes the call, with arguments behind those of the operator.
        """
        part = f"{self.name}[: len({self.order.name})]"
        if self.takes:
            drop = f"; del {self.takes}" if self.is_last else ""
            return f"{self.name} = {call([])}; {rows} = {part}{drop}"
        opening = f"{self.name} = {self.like.name}.new_empty({self.shape})"
        name = self.form._schema.arguments[-1].name
        return f"{opening}; {rows} = {call([f'{name}={part}'])}"


@dataclass(frozen=True)
class Rooms:
    """The rooms of a graph.

    Attributes:
        of: the room of rows.
        filled: the values that are such a room; their own operators do not run.
    """

    of: Mapping[fx.Node, Room] = field(default_factory=dict)
    filled: frozenset[fx.Node] = frozenset()


def rooms_of(graph: fx.Graph, constants: Collection[fx.Node]) -> Rooms:
    """Find the rooms of a graph.

    Args:
        graph: the graph.
        constants: nodes whose values are known, which have no names in the source.
    """
    search = _RoomSearch(graph, constants)
    rooms: dict[fx.Node, Room] = {}
    filled: set[fx.Node] = set()
    for node in graph.find_nodes(op="call_function", target=WITH_ROOM):
        rows, order, count = node.args
        assert isinstance(rows, fx.Node)
        assert isinstance(order, fx.Node)
        room = search.room(node.name, rows, order, count)
        if room is not None and rows not in rooms and not search.is_written(node):
            rooms[rows] = room
            filled.add(node)
    rooms |= dict(_products_in_rooms(graph, rooms, search))
    return Rooms(rooms, frozenset(filled))


def _products_in_rooms(
    graph: fx.Graph, rooms: Mapping[fx.Node, Room], search: _RoomSearch
) -> Iterator[tuple[fx.Node, Room]]:
    """The products of rooms whose factors have rooms, too, and the rooms of these."""
    own: dict[fx.Node, Room] = {}
    products: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        room = rooms.get(node)
        if room is None or node.target is not GROUPED_MM or len(node.args[0].meta["val"].shape) > 2:
            continue
        rows = node.args[0]
        place = rooms.get(rows) or own.get(rows)
        if place is None:
            place = search.room(f"ROOM_{rows.name}", rows, room.order, room.shape[0])
            if place is not None:
                own[rows] = place
        if place is not None and place.order is room.order:
            products[node] = rows
    last = {rows: node for node, rows in products.items()}
    for node, rows in products.items():
        name = (rooms.get(rows) or own[rows]).name
        yield node, replace(rooms[node], takes=name, is_last=rows in own and last[rows] is node)
    yield from ((rows, room) for rows, room in own.items() if rows in last)


class _RoomSearch:
    """Looks for rooms in a graph; arguments are those of `rooms_of`."""

    def __init__(self, graph: fx.Graph, constants: Collection[fx.Node]) -> None:
        self._constants = frozenset(constants)
        self._places = {node: number for number, node in enumerate(graph.nodes)}
        self._written = {
            memory_of(value)
            for node in graph.nodes
            if node.op == "call_function"
            for value in written_values(node.target, node.args, node.kwargs)
            if isinstance(value, fx.Node)
        }

    def room(self, name: str, rows: fx.Node, order: fx.Node, count: int) -> Room | None:
        """The room of that name for rows, if their operator can write there."""
        form, like = _writing_form(rows), _like(rows, self._constants)
        is_known = self._places[order] <= self._places[rows]
        if form is None or like is None or not is_known or self.is_written(rows):
            return None
        if self._constants & {rows, order}:
            return None
        return Room(name, order, like, (count, *rows.meta["val"].shape[1:]), form)

    def is_written(self, node: fx.Node) -> bool:
        """True if something writes to the memory of a value."""
        return memory_of(node) in self._written


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


_WRITING = (GROUPED_MM, torch.ops.aten.index_select.default)


def _writing_form(rows: fx.Node) -> torch._ops.OpOverload | None:
    """The form of the operator of rows that takes the same arguments, and a tensor to write to."""
    target = rows.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if target not in _WRITING and torch.Tag.pointwise not in target.tags:
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
