"""The graph of a method as JSON: operators of torch, on nodes, with the types of their values."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..reuse.saving_functions import META
from .fakes import FakeReader, FakeWriter
from .function_names import operator_name, operator_named
from .plain_text import Damaged, Json, NotStorable, decoded, encoded

_CONSTANT_BYTES = 1 << 16
"""A graph whose constants are larger in all is not written."""

_GETITEM = "getitem"


def graph_json(owner: torch.nn.Module, graph: fx.Graph) -> Json:
    """The JSON of a graph.

    Args:
        owner: holds its constants.
        graph: the graph.

    Raises:
        NotStorable: a node is no operator of torch, or a value or constant has no text.
    """
    fakes = FakeWriter()
    numbers: dict[fx.Node, int] = {}
    constants: dict[str, Json] = {}
    room = _CONSTANT_BYTES

    def reference(value: Any) -> int | None:
        return numbers[value] if isinstance(value, fx.Node) else None

    def typed(value: Any) -> Json:
        """The JSON of a node's value."""
        if isinstance(value, torch.Tensor):
            return ["fake", *fakes.json(value)]
        if isinstance(value, (tuple, list)):
            return ["all", *map(typed, value)]
        return encoded(value)

    rows: list[Json] = []
    for node in graph.nodes:
        target = _target(node)
        if node.op == "get_attr" and target not in constants:
            constants[target], size = constant_json(getattr(owner, target, None))
            room -= size
            if room < 0:
                raise NotStorable("its constants are large")
        arguments = [encoded(argument, reference) for argument in node.args]
        named = [[name, encoded(value, reference)] for name, value in node.kwargs.items()]
        value = node.meta.get("val")
        row = [node.op, node.name, target, arguments, named, typed(value), node.meta.get(META)]
        rows.append(row)
        numbers[node] = len(numbers)
    return {"storages": fakes.storages, "constants": constants, "nodes": rows}


def read_graph(json: Json, mode: FakeTensorMode) -> tuple[torch.nn.Module, fx.Graph]:
    """The holder of the constants, and the graph, of a JSON.

    Args:
        json: what `graph_json` has given.
        mode: makes fakes.

    Raises:
        Damaged: it is no such JSON.
    """
    try:
        owner = torch.nn.Module()
        for name, constant in json["constants"].items():
            owner.register_buffer(name, read_constant(constant), persistent=False)
        graph = fx.Graph()
        reader = FakeReader(mode, json["storages"])
        nodes: list[fx.Node] = []
        for row in json["nodes"]:
            nodes.append(_read_node(graph, row, nodes, reader))
        graph.output_node()
        return owner, graph
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise Damaged(f"a graph: {error}") from error


def numbers_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """The number of each node, by which other texts refer to it."""
    return {node: number for number, node in enumerate(graph.nodes)}


def nodes_at(nodes: Sequence[fx.Node], numbers: Iterable[int]) -> tuple[fx.Node, ...]:
    """The nodes of some numbers.

    Raises:
        Damaged: there is no such node.
    """
    try:
        return tuple(nodes[number] for number in numbers)
    except (IndexError, TypeError) as error:
        raise Damaged(f"a node: {error}") from error


def _target(node: fx.Node) -> str:
    """The text of what a node does.

    Raises:
        NotStorable: it is no operator of torch.
    """
    if node.op != "call_function":
        return str(node.target)
    if node.target is operator.getitem:
        return _GETITEM
    if not isinstance(node.target, torch._ops.OpOverload):
        raise NotStorable(f"{node.target} is no operator of torch")
    return operator_name(node.target)


def _read_node(graph: fx.Graph, row: Json, nodes: list[fx.Node], reader: FakeReader) -> fx.Node:
    op, name, target, arguments, named, value, mark = row
    if op not in ("placeholder", "get_attr", "call_function", "output"):
        raise Damaged(f"a node of kind {str(op)[:80]}")
    called: Any = str(target)
    if op == "call_function":
        called = operator.getitem if target == _GETITEM else operator_named(called)
    elif not called.isidentifier():
        raise Damaged(f"a name {called[:80]}")
    node = graph.create_node(op, called, name=name)
    if node.name != name:
        raise Damaged(f"a node has the name {str(name)[:80]}")
    # As in `copy_node`: behind its creation, which would search arguments for symbolic numbers.
    node.args = tuple([decoded(argument, nodes.__getitem__) for argument in arguments])
    if named:
        node.kwargs = {key: decoded(item, nodes.__getitem__) for key, item in named}
    if op != "output":
        node.meta["val"] = _read_value(value, reader)
    if mark is not None:
        node.meta[META] = str(mark)
    return node


def _read_value(json: Json, reader: FakeReader) -> Any:
    tag, *parts = json
    if tag == "fake":
        return reader.fake(parts)
    if tag == "all":
        return tuple([_read_value(part, reader) for part in parts])
    return decoded(json)


def constant_json(value: Any) -> tuple[Json, int]:
    """The JSON of a constant, and its bytes.

    Raises:
        NotStorable: it is no plain tensor of the host.
    """
    if (
        not isinstance(value, torch.Tensor)
        or isinstance(value, FakeTensor)
        or value.device.type != "cpu"
        or value.layout is not torch.strided
        or not value.is_contiguous()
        or value.is_conj()
        or value.is_neg()
        or value.requires_grad
    ):
        raise NotStorable("a constant is no plain tensor of the host")
    size = value.nbytes
    if size > _CONSTANT_BYTES:
        raise NotStorable("a constant is large")
    with torch.no_grad():
        content = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [encoded(value.dtype), list(value.shape), content.hex()], size


def read_constant(json: Json) -> torch.Tensor:
    """The constant of a JSON."""
    dtype, shape, content = json
    data = bytearray(bytes.fromhex(content))
    if not data:
        return torch.empty(shape, dtype=decoded(dtype))
    return torch.frombuffer(data, dtype=decoded(dtype)).reshape(shape)
