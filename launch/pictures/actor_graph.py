"""The actor graph of a scheduled module: its calls, and the values that flow between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ...ir.attributes import Effect
from ...ir.ops import (
    Assemble,
    Broadcast,
    Call,
    Collective,
    Copy,
    Op,
    Recv,
    Return,
    Send,
    Slice,
    Value,
    View,
    Wait,
)
from ...ir.ops.module import Channel, Function, Module, Program
from ...ir.types import TensorType, format_ranks, promised
from .model import WorkKind
from .op_boxes import OpBoxes

Key: TypeAlias = tuple[str, ...]
"""The key of a node; the same for all microbatches."""

Transport: TypeAlias = Callable[[Channel], str]
"""Gives the transport of a channel, in words."""


@dataclass(slots=True)
class GraphNode:
    """A call, or an input, an output or a collective of the step.

    Attributes:
        rank: where it is; a collective is with the first rank of its group.
        title, detail: its name, and that of its actor; of a collective, the ranks.
        layout: of what it gives, where ranks hold parts of that; of a collective, the type.
        kind: of work, for the colour; None if it is no call.
        source: the user's line, if it is known.
        count: in how many microbatches it occurs.
        layer: how many nodes have to come before it, one after the other.
    """

    rank: int
    title: str
    detail: str
    kind: WorkKind | None
    source: str = ""
    count: int = 0
    layer: int = 0
    layout: str = ""


@dataclass(slots=True)
class Edge:
    """The values that flow from one node to another, over all microbatches.

    Attributes:
        types: of the values; a value for each microbatch counts once. Between ranks these are of
            what travels; on one rank they have layouts, where these are known.
        transport: how it gets to another rank; empty on the same one.
        is_state: no value flows, but the actor's state is handed on.
    """

    types: list[str] = field(default_factory=list)
    transport: str = ""
    is_state: bool = False

    @property
    def text(self) -> str:
        """The types, each once, with its number."""
        counts = Counter(self.types)
        return ", ".join(t if n == 1 else f"{n} of {t}" for t, n in counts.items())


@dataclass(slots=True)
class ActorGraph:
    """Nodes and edges by key; the nodes in an order in which they can run."""

    name: str
    world: int
    nodes: dict[Key, GraphNode] = field(default_factory=dict)
    edges: dict[tuple[Key, Key], Edge] = field(default_factory=dict)


def actor_graph(
    module: Module, transport: Transport, traced: Mapping[str, Function] | None = None
) -> ActorGraph:
    """The actor graph of a scheduled module.

    Calls of different microbatches are one node. Waits, views, copies and messages are not nodes:
    what goes through them is an edge.

    Args:
        module: scheduled.
        transport: describes the transport of a channel.
        traced: the functions as they were traced, by name; their types have layouts.
    """
    maker = _GraphMaker(module, transport, traced or {})
    return maker.make()


@dataclass(frozen=True, slots=True)
class _NodeOrigin:
    """The node that a value came from, its channel, and its type with a layout, if it has one."""

    node: Key
    channel: Channel | None = None
    type: TensorType | None = None


class _GraphMaker:
    """Makes one graph."""

    def __init__(
        self, module: Module, transport: Transport, traced: Mapping[str, Function]
    ) -> None:
        self._module = module
        self._traced = traced
        self._transport = transport
        self._graph = ActorGraph(module.name, module.world)
        self._boxes = {p.rank or 0: OpBoxes(module, p) for p in module.programs}
        self._sent: dict[tuple[int, int], tuple[int, Value]] = {}
        self._makers: dict[int, dict[Value, Op]] = {}
        self._keys: dict[int, Key] = {}
        self._seen: dict[tuple[Key, Key], set[tuple[int | None, str]]] = {}

    def make(self) -> ActorGraph:
        for program in self._module.programs:
            self._name_nodes(program)
        for program in self._module.programs:
            self._connect(program)
        for program in self._module.programs:
            self._hand_on_state(program)
        _layer(self._graph)
        return self._graph

    # -- nodes ------------------------------------------------------------------------------

    def _name_nodes(self, program: Program) -> None:
        rank = program.rank or 0
        makers = self._makers[rank] = {}
        occurrences: Counter[tuple[str, int | None]] = Counter()
        for op in program.ops:
            makers.update(dict.fromkeys(op.results, op))
            if isinstance(op, Send) or (isinstance(op, Broadcast) and op.operands):
                self._sent[op.chan or 0, op.seq or 0] = (rank, op.operands[0])
            name = self._name(op)
            if name is not None:
                number = occurrences[name, op.mb]
                occurrences[name, op.mb] += 1
                self._add(rank, op, name, number)

    def _name(self, op: Op) -> str | None:
        """The name that tells a node from others of its rank and microbatch."""
        if isinstance(op, Call):
            return op.fn.name
        if isinstance(op, Collective) and not isinstance(op, Broadcast):
            return f"{op.opcode} {op.chan}"
        return "return" if isinstance(op, Return) and op.operands else None

    def _add(self, rank: int, op: Op, name: str, number: int) -> None:
        home = op.group.ranks[0] if isinstance(op, Collective) else rank
        key = (str(home), name, str(number))
        self._keys[id(op)] = key
        node = self._graph.nodes.get(key)
        if node is None:
            node = self._graph.nodes[key] = self._node(home, op)
        if home == rank:
            node.count += 1

    def _node(self, rank: int, op: Op) -> GraphNode:
        if isinstance(op, Collective):
            types = ", ".join(str(promised(value.type)) for value in op.results)
            ranks = f"ranks {format_ranks(op.group.ranks)}"
            return GraphNode(rank, op.opcode, ranks, WorkKind.MESSAGE, layout=types)
        if not isinstance(op, Call):
            return GraphNode(rank, op.opcode, "", None)
        box = self._boxes[rank].of(op)
        actor = self._module.functions[op.fn.name].actor
        title = _title(self._module.functions[op.fn.name].body_name, actor)
        laid_out = [type_ for type_ in self._types(op, of_results=True) if type_ is not None]
        layout = ", ".join(map(str, dict.fromkeys(laid_out)))
        return GraphNode(rank, title, actor or "", box.kind, box.source, layout=layout)

    def _types(self, op: Op, of_results: bool) -> Sequence[TensorType | None]:
        """The types that a call gives, or else takes, with their layouts; None without a layout."""
        if not isinstance(op, Call):
            return ()
        function = self._traced.get(self._module.functions[op.fn.name].body_name)
        types = () if function is None else function.outputs if of_results else function.inputs
        return [t if isinstance(t, TensorType) and t.layout is not None else None for t in types]

    # -- edges ------------------------------------------------------------------------------

    def _connect(self, program: Program) -> None:
        rank = program.rank or 0
        for op in program.ops:
            key = self._keys.get(id(op))
            if key is None:
                continue
            input_types = self._types(op, of_results=False)
            for index, value in enumerate(op.operands):
                type_ = input_types[index] if len(input_types) == len(op.operands) else None
                for origin in self._origins(rank, value):
                    self._edge(origin, key, value, op.mb, type_ or origin.type)

    def _origins(self, rank: int, value: Value) -> Iterator[_NodeOrigin]:
        """The nodes that a value comes from."""
        channel: Channel | None = None
        while True:
            op = self._makers[rank].get(value)
            if op is None:
                yield _NodeOrigin(self._input(rank, value), channel)
                return
            if id(op) in self._keys:
                output_types = self._types(op, of_results=True)
                type_ = (
                    output_types[op.results.index(value)]
                    if len(output_types) == len(op.results)
                    else None
                )
                yield _NodeOrigin(self._keys[id(op)], channel, type_)
                return
            if isinstance(op, Recv | Broadcast):
                channel = self._module.channels.get(op.chan or 0)
                rank, value = self._sent[op.chan or 0, op.seq or 0]
            elif isinstance(op, Assemble):
                for part in op.operands:
                    yield from self._origins(rank, part)
                return
            elif isinstance(op, Wait | View | Copy | Slice) and op.operands:
                value = op.operands[0]
            else:
                return  # a constant, or nothing but the fact that something has happened

    def _input(self, rank: int, value: Value) -> Key:
        key = (str(rank), "input", value.name)
        if key not in self._graph.nodes:
            node = GraphNode(rank, value.name, "input", None, count=1)
            # Inputs come first.
            self._graph.nodes = {key: node, **self._graph.nodes}
        return key

    def _edge(
        self,
        origin: _NodeOrigin,
        target: Key,
        value: Value,
        mb: int | None,
        laid_out: TensorType | None,
    ) -> None:
        if origin.node == target:
            return
        pair = (origin.node, target)
        edge = self._graph.edges.setdefault(pair, Edge())
        ranks = self._graph.nodes[origin.node].rank, self._graph.nodes[target].rank
        if origin.channel is not None and ranks[0] != ranks[1]:
            edge.transport = self._transport(origin.channel)
        travels = bool(edge.transport) or laid_out is None
        type_ = promised(value.type) if travels else laid_out
        # Of all microbatches the first alone counts.
        seen = self._seen.setdefault(pair, set())
        first = next((microbatch for microbatch, _ in seen), mb)
        if mb == first:
            edge.types.append(str(type_))
        seen.add((first, str(type_)))

    def _hand_on_state(self, program: Program) -> None:
        """Add an edge of state to each call that takes no value of another call."""
        latest: dict[str | None, Key] = {}
        fed = {target for source, target in self._graph.edges if source[1] != "input"}
        for op in program.ops:
            if not isinstance(op, Call):
                continue
            function = self._module.functions[op.fn.name]
            if function.actor is None or function.effect is Effect.PURE:
                continue
            key = self._keys[id(op)]
            for state, _ in function.touches:
                previous = latest.get(state)
                if previous is not None and key not in fed:
                    self._graph.edges.setdefault((previous, key), Edge(is_state=True))
                latest[state] = key
            # Later microbatches come after much that the first one does not need.
            fed.add(key)


_PARTS = {
    ".vjp.forward": "",
    ".vjp.backward": "backward of ",
    ".vjp.input": "inputs' grad of ",
    ".vjp.weight": "weights' grad of ",
}
"""The names of the parts of a derivative, for readers."""


def _title(function: str, actor: str | None) -> str:
    """The name of a function, for readers."""
    name = function.removeprefix("torch." if actor is None else f"{actor}.")
    base, _, number = name.rpartition(".part")
    if base and number.isdigit():
        return f"{_title(base, None)} {int(number) + 1}"
    for suffix, prefix in _PARTS.items():
        if name.endswith(suffix):
            return prefix + name.removesuffix(suffix)
    return name


def _layer(graph: ActorGraph) -> None:
    """Put each node behind all that it needs.

    Merging microbatches can close a circle, where a microbatch hands something to the next; an
    edge that would close one does not count.
    """
    needs: dict[Key, list[Key]] = {key: [] for key in graph.nodes}
    for source, target in graph.edges:
        needs[target].append(source)
    layer_of: dict[Key, int] = {}
    for start in graph.nodes:
        path: list[Key] = [start]
        on_path: set[Key] = {start}
        while path:
            key = path[-1]
            missing = [k for k in needs[key] if k not in layer_of and k not in on_path]
            if missing:
                path.append(missing[0])
                on_path.add(missing[0])
                continue
            layers = [layer_of[k] for k in needs[key] if k in layer_of]
            layer_of[key] = max(layers, default=-1) + 1
            on_path.discard(path.pop())
    for key, layer in layer_of.items():
        graph.nodes[key].layer = layer
