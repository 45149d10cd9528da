"""Traces of methods as text, which another process reads and compares its own call with.

A text holds the graph of a method and the log of the torch functions that the method has used. It
is not taken on trust: the method's Python runs once more on fakes, without operators, and has to
call the same functions on the same arguments (`alike.py`). So nobody has to list what a method
reads. The key holds only what the functions themselves depend on: the types of tensors, and torch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...ir.location import Location
from ..lazy import Lazy
from ..values.interface import TracedCall
from ..values.specs import Leaf, ObjectSpec, Static, TensorSpec, Tree
from .call_fakes import input_fakes, state_fakes
from .joint import Wanted
from .joint_graph import Joint, JointNodes, Kept
from .purity.function_log import FunctionLog
from .stored.graph_text import graph_json, nodes_at, numbers_of, read_graph
from .stored.log_text import log_json, read_log
from .stored.plain_text import Damaged, Json, NotStorable, decoded, encoded


class TraceStore(Protocol):
    """The traces of methods that earlier starts have kept."""

    @property
    def is_empty(self) -> bool:
        """True if there are none, so that no key is needed."""

    def read(self, key: str) -> Iterator[str]:
        """The texts of traces with a key, the youngest first."""

    def keep(self, key: str, make_text: Callable[[], str]) -> None:
        """Keep a trace. `make_text` is called later, and may raise `NotStorable`."""

    def take(self, call: str) -> None:
        """Say that a call has the trace of an earlier start."""

    def mend(self, call: str, reason: str) -> None:
        """Say why a part of a trace that a call has is made anew."""

    def leave_out(self, call: str, reason: str) -> None:
        """Say why a call is not kept, or why kept traces do not serve it."""


USES_GRADIENTS = "it works on gradients"
"""The text that is kept for a call that works on gradients before it uses a torch function."""


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


def joint_text(joint: Joint, pieces: Json, is_compared: bool = True) -> str:
    """The text of a trace, in three lines: what is compared, the graph, and its pieces.

    Args:
        joint: the trace.
        pieces: the JSON of what it was cut into.
        is_compared: whether another call is compared with it, by its log.

    Raises:
        NotStorable: something in it has no text.
    """
    index = {id(tensor): i for i, tensor in enumerate(joint.tensors)}
    compared = {
        "log": log_json(joint.functions) if is_compared else None,
        "graded": [index[id(tensor)] for tensor in joint.graded],
        "wanted": [joint.wanted_outputs, joint.wanted_inputs],
        "reaching": joint.reaching,
        "references": joint.references,
        "referred": joint.referred,
        "views": joint.views,
        "results": [list(map(leaf_json, joint.results.leaves)), encoded(joint.results.spec)],
        "draws": joint.draws,
        "written": [sorted(joint.written), sorted(joint.backward_written)],
    }
    parts = compared, _nodes_json(joint.nodes.value), pieces
    return "\n".join(json.dumps(part, separators=(",", ":")) for part in parts)


_NODES = ("state", "inputs", "cotangents", "outputs", "rebinds", "input_grads", "state_grads")
"""The fields of `JointNodes` that are nodes."""


def _nodes_json(nodes: JointNodes) -> Json:
    numbers = numbers_of(nodes.graph)
    named = {node.name: number for node, number in numbers.items()}
    lines: dict[Location, int] = {}
    places = [
        [named[name], lines.setdefault(line, len(lines))]
        for name, line in nodes.locations.items()
        if name in named
    ]
    return {
        "graph": graph_json(nodes.owner, nodes.graph),
        "nodes": {name: [numbers[node] for node in getattr(nodes, name)] for name in _NODES},
        "forward": sorted(named[name] for name in nodes.forward if name in named),
        "lines": [[line.file, line.line, line.function] for line in lines],
        "places": places,
    }


def read_joint(
    text: str,
    call: TracedCall,
    wanted: Wanted | None,
    trace: Callable[[Damaged], Joint],
    mend: Callable[[str], None],
) -> Joint:
    """The trace of a text, as if `call` had been traced; it has yet to be compared with the call.

    Args:
        text: the text. Its graph is read when something asks for a node.
        call: the call.
        wanted: the derivative that is wanted, if any.
        trace: traces the call, if the graph is damaged.
        mend: is told why another part is made anew.

    Raises:
        Damaged: the text is not one that `joint_text` gives.
        TraceError: the call cannot be traced.
    """
    try:
        compared, graph, pieces = text.split("\n")
        content = json.loads(compared)

        def nodes() -> JointNodes:
            try:
                return _read_nodes(json.loads(graph), functions.mode)
            except (Damaged, ValueError, TypeError, KeyError, IndexError) as error:
                return trace(Damaged(f"a graph: {error}")).nodes.value

        functions = _read_functions(content["log"], call, wanted)
        kept = Kept(Lazy(lambda: json.loads(pieces)), lambda line: line, mend)
        return _joint_of(content, call, functions, Lazy(nodes), kept)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise Damaged(f"a trace: {error}") from error


def _read_functions(log: Json, call: TracedCall, wanted: Wanted | None) -> FunctionLog:
    mode = FakeTensorMode(allow_non_fake_inputs=False, shape_env=None)
    if log is None:
        return FunctionLog(mode, (), ())  # no call is compared with it
    differentiated = frozenset() if wanted is None else frozenset(wanted.inputs)
    state, inputs = state_fakes(call, mode), input_fakes(call, mode, differentiated)
    return read_log(log, mode, state, inputs)


def _joint_of(
    content: Json, call: TracedCall, functions: FunctionLog, nodes: Lazy[JointNodes], kept: Kept
) -> Joint:
    tensors = tuple(call.state.tensors)
    wanted_outputs, wanted_inputs = content["wanted"]
    written, backward_written = content["written"]
    leaves, spec = content["results"]
    return Joint(
        nodes=nodes,
        tensors=tensors,
        rebound=(),  # the comparison knows those of the call
        graded=tuple(tensors[i] for i in content["graded"]),
        wanted_outputs=tuple(wanted_outputs),
        wanted_inputs=tuple(wanted_inputs),
        reaching=tuple(map(tuple, content["reaching"])),
        references=tuple(content["references"]),
        referred=tuple(content["referred"]),
        views=tuple((i, j) for i, j in content["views"]),
        results=Tree(tuple(map(_read_leaf, leaves)), decoded(spec)),
        draws=bool(content["draws"]),
        log=None,
        functions=functions,
        written=frozenset(written),
        backward_written=frozenset(backward_written),
        reads={},
        initial=(),
        kept=kept,
    )


def _read_nodes(content: Json, mode: FakeTensorMode) -> JointNodes:
    owner, graph = read_graph(content["graph"], mode)
    nodes = list(graph.nodes)
    lines = [Location(*line) for line in content["lines"]]
    return JointNodes(
        owner=owner,
        graph=graph,
        forward=frozenset(nodes[number].name for number in content["forward"]),
        locations={nodes[number].name: lines[line] for number, line in content["places"]},
        **{name: nodes_at(nodes, content["nodes"][name]) for name in _NODES},
    )


def _leaf_key(leaf: Leaf) -> Json:
    """The part of a leaf that keys hold. An object is compared by what the method does with it."""
    if isinstance(leaf, Static):
        try:
            return encoded(leaf.value)
        except NotStorable:
            return _type_json(type(leaf.value))
    return leaf_json(leaf)


def leaf_json(leaf: Leaf) -> Json:
    """The JSON of a leaf of arguments or results.

    Raises:
        NotStorable: it is no plain data.
    """
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
    if type(outline) is tuple:
        return list(map(_outline_json, outline))
    return encoded(outline) if type(outline) is float else _outline_leaf(outline)


@functools.lru_cache(1024, typed=True)
def _outline_leaf(leaf: Hashable) -> Json:
    """The JSON of a value in an outline. The tensors of a model have few in common.

    Raises:
        NotStorable: it is neither plain data nor a type.
    """
    return _type_json(leaf) if isinstance(leaf, type) else encoded(leaf)


def _type_json(kind: type) -> Json:
    return f"{kind.__module__}.{kind.__qualname__}"
