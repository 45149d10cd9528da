"""Traces of methods as text, which another process reads and compares its own call with.

A text holds the graph of a method and the log of the torch functions that the method has used. It
is not taken on trust: the method's Python runs once more on fakes, without operators, and has to
call the same functions on the same arguments (`alike.py`). So nobody has to list what a method
reads. The key holds only what the functions themselves depend on: the types of tensors, and torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ...ir.location import Location
from ..values.interface import TracedCall
from ..values.specs import Leaf, ObjectSpec, Static, TensorSpec, Tree
from .call_fakes import input_fakes, state_fakes
from .joint import Joint, Wanted
from .purity.changes import Rebind
from .stored.graph_text import graph_json, nodes_at, numbers_of, read_graph
from .stored.log_text import log_json, read_log
from .stored.plain_text import Damaged, Json, NotStorable, decoded, encoded


class TraceStore(Protocol):
    """The traces of methods that earlier starts have kept."""

    def read(self, key: str) -> Iterator[str]:
        """The texts of traces with a key, the youngest first."""

    def keep(self, key: str, make_text: Callable[[], str]) -> None:
        """Keep a trace. `make_text` is called later, and may raise `NotStorable`."""

    def take(self, call: str) -> None:
        """Say that a call has the trace of an earlier start."""

    def leave_out(self, call: str, reason: str) -> None:
        """Say why a call is not kept, or why kept traces do not serve it."""


def trace_key(call: TracedCall, wanted: Wanted | None, outline: Hashable | None) -> str:
    """The key of calls whose traces may be alike.

    Args:
        call: the call.
        wanted: the derivative to trace as well, if any.
        outline: of the actor's tensors, as `alike.py` has it.

    Raises:
        NotStorable: no other process could have the same key.
    """
    if outline is None:
        raise NotStorable("a tensor of its actor cannot be compared")
    parts = [
        call.shown,
        encoded(call.signature.spec),
        [_leaf_key(leaf) for leaf in call.signature.leaves],
        str(call.device),
        call.is_of_mesh,
        [] if call.float8 is None else list(map(str, call.float8.layers)),
        None if wanted is None else [wanted.outputs, wanted.inputs],
        torch.is_grad_enabled(),
        _outline_json(outline),
    ]
    return json.dumps(parts)


def joint_text(joint: Joint) -> str:
    """The text of a trace.

    Raises:
        NotStorable: something in it has no text.
    """
    numbers = numbers_of(joint.graph)
    tensors = [tensor for _, tensor in joint.state]
    index = {id(tensor): i for i, tensor in enumerate(tensors)}
    lines: dict[Location, int] = {}
    named = {node.name: number for node, number in numbers.items()}
    places = [
        [named[name], lines.setdefault(line, len(lines))]
        for name, line in joint.locations.items()
        if name in named
    ]
    content = {
        "graph": graph_json(joint.owner, joint.graph),
        "log": log_json(joint.functions),
        "state": [numbers[node] for node, _ in joint.state],
        "inputs": [numbers[node] for node in joint.inputs],
        "cotangents": [numbers[node] for node in joint.cotangents],
        "outputs": [numbers[node] for node in joint.outputs],
        "rebinds": [[*_slot_of(rebind, index), numbers[node]] for rebind, node in joint.rebinds],
        "wanted": [joint.wanted_outputs, joint.wanted_inputs],
        "input grads": [numbers[node] for node in joint.input_grads],
        "reaching": joint.reaching,
        "state grads": [[index[id(tensor)], numbers[node]] for tensor, node in joint.state_grads],
        "forward": sorted(named[name] for name in joint.forward if name in named),
        "results": [list(map(_leaf_json, joint.results.leaves)), encoded(joint.results.spec)],
        "lines": [[line.file, line.line, line.function] for line in lines],
        "places": places,
        "draws": joint.draws,
        "written": [sorted(joint.written), sorted(joint.backward_written)],
    }
    return json.dumps(content, separators=(",", ":"))


def read_joint(text: str, call: TracedCall, wanted: Wanted | None) -> Joint:
    """The trace of a text, as if `call` had been traced; it has yet to be compared with the call.

    Raises:
        Damaged: the text is not one that `joint_text` gives.
        TraceError: the call cannot be traced.
    """
    try:
        return _joint_of(json.loads(text), call, wanted)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise Damaged(f"a trace: {error}") from error


def _joint_of(content: Json, call: TracedCall, wanted: Wanted | None) -> Joint:
    mode = FakeTensorMode(allow_non_fake_inputs=False, shape_env=None)
    state = state_fakes(call, mode)
    differentiated = frozenset() if wanted is None else frozenset(wanted.inputs)
    inputs = input_fakes(call, mode, differentiated)
    owner, graph = read_graph(content["graph"], mode)
    nodes = list(graph.nodes)
    tensors = call.state.tensors
    lines = [Location(*line) for line in content["lines"]]

    def at(numbers: Json) -> tuple[fx.Node, ...]:
        return nodes_at(graph, numbers)

    rebinds = []
    for tensor, slot, shared, number in content["rebinds"]:
        (node,) = at([number])
        slots = tensors[tensor].slots
        rebinds.append((Rebind(tensors[tensor], slots[slot], node.meta["val"], shared), node))
    wanted_outputs, wanted_inputs = content["wanted"]
    written, backward_written = content["written"]
    leaves, spec = content["results"]
    return Joint(
        owner=owner,
        graph=graph,
        state=tuple(zip(at(content["state"]), tensors, strict=True)),
        inputs=at(content["inputs"]),
        cotangents=at(content["cotangents"]),
        outputs=at(content["outputs"]),
        rebinds=tuple(rebinds),
        wanted_outputs=tuple(wanted_outputs),
        wanted_inputs=tuple(wanted_inputs),
        input_grads=at(content["input grads"]),
        reaching=tuple(map(tuple, content["reaching"])),
        state_grads=tuple((tensors[i], *at([n])) for i, n in content["state grads"]),
        forward=frozenset(nodes[number].name for number in content["forward"]),
        results=Tree(tuple(map(_read_leaf, leaves)), decoded(spec)),
        locations={nodes[number].name: lines[line] for number, line in content["places"]},
        draws=bool(content["draws"]),
        log=None,
        functions=read_log(content["log"], mode, state, inputs),
        written=frozenset(written),
        backward_written=frozenset(backward_written),
        reads={},
        initial=(),
    )


def _slot_of(rebind: Rebind, index: dict[int, int]) -> tuple[int, int, bool]:
    """The number of a rebound tensor, that of its slot, and whether its memory is shared."""
    slots = [slot is rebind.slot for slot in rebind.tensor.slots]
    return index[id(rebind.tensor)], slots.index(True), rebind.shared


def _leaf_key(leaf: Leaf) -> Json:
    """The part of a leaf that keys hold. An object is compared by what the method does with it."""
    if isinstance(leaf, Static):
        try:
            return encoded(leaf.value)
        except NotStorable:
            return _type_json(type(leaf.value))
    return _leaf_json(leaf)


def _leaf_json(leaf: Leaf) -> Json:
    match leaf:
        case TensorSpec(dtype, shape, requires_grad):
            return ["tensor", encoded(dtype), list(shape), requires_grad]
        case ObjectSpec():
            return ["object"]
        case Static(value):
            return ["static", encoded(value)]


def _read_leaf(content: Json) -> Leaf:
    match content:
        case ["tensor", dtype, shape, requires_grad]:
            return TensorSpec(decoded(dtype), tuple(shape), bool(requires_grad))
        case ["static", value]:
            return Static(decoded(value))
        case ["object"]:
            return ObjectSpec()
    raise Damaged(f"a result is {str(content)[:80]}")


def _outline_json(outline: Any) -> Json:
    """The JSON of a key that this process compares by objects such as types.

    Raises:
        NotStorable: it holds something else than plain data and types.
    """
    if isinstance(outline, type):
        return _type_json(outline)
    if type(outline) is tuple:
        return list(map(_outline_json, outline))
    return encoded(outline)


def _type_json(kind: type) -> Json:
    return f"{kind.__module__}.{kind.__qualname__}"
