"""Compile a graph in parts, and equal parts and graphs once.

A compiler takes its time for each operator of a graph, and the layers of a model are the same
operators. So a graph is cut into what stands ahead of its layers, the layers, and what stands
behind. A layer's code is compiled once, and runs as often as there are layers, each time with other
tensors. Cuts stand where no kernel would be fused across them (`repeats.py`). Where ranks exchange
something, each layer is functions of its own, whose graphs are equal as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten

from .repeats import LEAST, find_repeat

Compute = Callable[[list[Tensor]], Sequence[Tensor]]
"""Computes a graph from a list of tensors for its placeholders; it may empty the list."""
Compile = Callable[[fx.GraphModule, Sequence[Tensor]], Compute]
"""Compiles a graph, whose placeholders are like the fake tensors."""

NOWHERE = float("inf")
"""The cost of a cut where none may be."""
ALIGNMENT = 16
"""Bytes; a compiler makes other code for tensors that begin between multiples of it."""


class CompiledGraphs:
    """The code of graphs that are compiled as a whole, which equal graphs share.

    Args:
        compile_: compiles a graph as a whole.
    """

    def __init__(self, compile_: Compile) -> None:
        self._compile = compile_
        self._known: dict[Any, tuple[Compute, fx.GraphModule]] = {}

    def compute(self, module: fx.GraphModule, fakes: Sequence[Tensor], key: Any) -> Compute:
        """The code of a graph.

        Args:
            key: equal for graphs that the same code computes; it may have ids of the module's
                constants, so the module is held.
        """
        if key not in self._known:
            self._known[key] = self._compile(module, fakes), module
        return self._known[key][0]

    def compute_alone(self, module: fx.GraphModule, fakes: Sequence[Tensor]) -> Compute:
        """The code of a graph that is compared with no other."""
        return self._compile(module, fakes)


def compile_in_parts(
    module: fx.GraphModule,
    fakes: Sequence[Tensor],
    mode: FakeTensorMode,
    compiled: CompiledGraphs,
    least: int = LEAST,
) -> Compute:
    """Compile a graph, and parts that repeat in it once.

    Args:
        fakes: for each placeholder a fake tensor.
        mode: of the fake tensors.
        compiled: graphs that have been compiled so far; it compiles others.
        least: operators that have to be saved, or the graph is compiled as a whole.
    """
    graph = _SplitGraph(module, fakes, mode)
    if not graph.is_plain:
        return compiled.compute_alone(module, fakes)
    spans = list(graph.spans(range(len(graph.operators)), least))
    if len(spans) < 2:
        return compiled.compute(module, fakes, graph.key(fakes))
    calls = []
    for span in spans:
        part = graph.part(span)
        compute = compiled.compute(part.module, part.fakes, part.key)
        calls.append(_PartCall(compute, part.inputs, part.outputs))
    return _chained(graph, calls)


def fake_like(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor of the layout of a tensor, in memory of its own.

    It begins as far behind a multiple of `ALIGNMENT`. Compiled code copies a tensor each time that
    lies at another place than the one it was compiled for. So parts that are equal but for this
    are compiled each.
    """
    offset = _offset(tensor)
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    with mode:
        memory = torch.empty(
            offset + last + 1 if tensor.numel() else offset,
            dtype=tensor.dtype,
            device=tensor.device,
        )
        return memory.as_strided(tensor.shape, tensor.stride(), offset)


def _offset(tensor: Tensor) -> int:
    """Elements between a multiple of `ALIGNMENT` and the first element."""
    return int(tensor.storage_offset()) % max(ALIGNMENT // tensor.itemsize, 1)


@dataclass(frozen=True)
class _GraphPart:
    """A part of a graph, as a graph of its own.

    Attributes:
        fakes: for each placeholder a fake tensor.
        inputs, outputs: the nodes of the whole graph that it takes and gives.
        key: equal for parts that the same code computes.
    """

    module: fx.GraphModule
    fakes: tuple[Tensor, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    key: Any


@dataclass(frozen=True)
class _PartCall:
    """A part's code, and the nodes of the whole graph that it takes and gives."""

    compute: Compute
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


class _SplitGraph:
    """A graph with a fake result for each node.

    Attributes:
        inputs: its placeholders.
        operators: its nodes that compute something, in their order.
        constants: the tensors of nodes that read attributes of the module.
        results: the nodes that it returns.
        is_plain: whether it can be cut: it returns tensors, and no node calls a module.
    """

    def __init__(self, module: fx.GraphModule, fakes: Sequence[Tensor], mode: FakeTensorMode):
        self._module, self._mode = module, mode
        *nodes, output = module.graph.nodes
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.operators = [node for node in nodes if node.op == "call_function"]
        reads = [node for node in nodes if node.op == "get_attr"]
        self.results: tuple[Any, ...] = tuple(output.args[0])
        self.is_plain = len(nodes) == len(self.inputs) + len(self.operators) + len(reads)
        self.is_plain &= all(isinstance(node, fx.Node) for node in self.results)
        if not self.is_plain:
            return
        propagation = _FakeResults(module)
        with torch.no_grad(), mode:
            propagation.run(*fakes)
        self._values = propagation.values
        self.constants: dict[fx.Node, Tensor] = {
            node: attrgetter(str(node.target))(module) for node in reads
        }
        self._order = {node: index for index, node in enumerate(self.operators)}
        self._returned = set(self.results)
        self._last_use = [
            max((self._order[user] for user in node.users if user in self._order), default=index)
            for index, node in enumerate(self.operators)
        ]
        self._costs = self._cuts()

    def spans(self, span: range, least: int) -> Iterator[range]:
        """Operators in parts: those that repeat, what stands ahead of them, and what behind."""
        operators = self.operators[span.start : span.stop]
        costs = self._costs[span.start : span.stop + 1]
        repeat = find_repeat(operators, self._signature, costs, least) if operators else None
        if repeat is None:
            if operators:
                yield span
            return
        bounds = [span.start + bound for bound in repeat.bounds]
        yield from self.spans(range(span.start, bounds[0]), least)
        yield from (range(begin, end) for begin, end in pairwise(bounds))
        yield from self.spans(range(bounds[-1], span.stop), least)

    def part(self, span: range) -> _GraphPart:
        """Some operators as a graph of their own."""
        nodes = self.operators[span.start : span.stop]
        inside = set(nodes)
        used = (argument for node in nodes for argument in node.all_input_nodes)
        inputs = tuple(dict.fromkeys(node for node in used if node not in inside))
        outputs = tuple(
            self.operators[index]
            for index in span
            if self._last_use[index] >= span.stop or self.operators[index] in self._returned
        )
        graph = fx.Graph()
        copies = {node: graph.placeholder(f"input_{i}") for i, node in enumerate(inputs)}
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in outputs))
        fakes = tuple(fake_like(self._values[node], self._mode) for node in inputs)
        numbers = {node: number for number, node in enumerate((*inputs, *nodes))}
        key = (
            tuple(_operation(node, numbers.__getitem__) for node in nodes),
            tuple(map(_layout, fakes)),
            tuple(map(_offset, fakes)),
            tuple(numbers[node] for node in outputs),
        )
        return _GraphPart(fx.GraphModule(self._module, graph), fakes, inputs, outputs, key)

    def key(self, fakes: Sequence[Tensor]) -> Any:
        """Equal for graphs that the same code computes as a whole, constants included."""
        written = {node for operator in self.operators for node in _overwritten(operator)}
        nodes = (*self.inputs, *self.constants, *self.operators)
        numbers = {node: number for number, node in enumerate(nodes)}
        return (
            tuple(_operation(node, numbers.__getitem__) for node in self.operators),
            tuple(map(_layout, fakes)),
            tuple(map(_offset, fakes)),
            tuple(_constant(value, node in written) for node, value in self.constants.items()),
            tuple(numbers[node] for node in self.results),
        )

    def _signature(self, node: fx.Node) -> Any:
        """Equal for operators that may be the same one of two parts."""
        layouts = tuple(map(_layout, tree_flatten(self._values[node])[0]))
        return _operation(node, lambda _: "a node"), layouts

    def _cuts(self) -> list[float]:
        """For a cut ahead of each operator the bytes that other operators take across it.

        It is `NOWHERE` where a value crosses that is no tensor, or one whose memory is written to:
        the code of a part does not know which of its inputs share memory.
        """
        count = len(self.operators) + 1
        changes, forbidden = [0.0] * count, [0] * count
        for index, node in enumerate(self.operators):
            value, end = self._values[node], self._last_use[index]
            if isinstance(value, Tensor):
                changes[index + 1] += value.nbytes
                changes[end + 1] -= value.nbytes
            else:
                forbidden[index + 1] += 1
                forbidden[end + 1] -= 1
        for begin, end in self._written():
            forbidden[begin + 1] += 1
            forbidden[end + 1] -= 1
        costs = zip(accumulate(changes), accumulate(forbidden), strict=True)
        return [NOWHERE if is_forbidden else bytes_ for bytes_, is_forbidden in costs]

    def _written(self) -> Iterator[tuple[int, int]]:
        """The first and the last operator that touch memory which operators write to.

        Memory of an input counts from where an operator gives a view of it.
        """
        spans: dict[int, tuple[int, int]] = {}
        written: set[int] = set()
        for index, node in enumerate(self.operators):
            written |= {_memory(self._values[argument]) for argument in _overwritten(node)}
            touched = [node, *(n for n in node.all_input_nodes if n.op == "call_function")]
            for tensor in tree_flatten([self._values[other] for other in touched])[0]:
                if isinstance(tensor, Tensor):
                    begin, _ = spans.get(_memory(tensor), (index, index))
                    spans[_memory(tensor)] = begin, index
        return (span for memory, span in spans.items() if memory in written)


class _FakeResults(fx.Interpreter):
    """Keeps the result of each node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = result = super().run_node(n)
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A constant, or a copy of a number.

        Of a number a fake tensor keeps the value, so that an operator writes to the number itself.
        """
        value = super().get_attr(target, args, kwargs)
        return value.clone() if isinstance(value, Tensor) and value.numel() == 1 else value


def _chained(graph: _SplitGraph, calls: Sequence[_PartCall]) -> Compute:
    """Call parts one behind the other; each value is given away at its last use."""
    kept = [*graph.inputs, *graph.constants, *(n for call in calls for n in call.outputs)]
    registers = {node: number for number, node in enumerate(kept)}
    last = {node: call for call in calls for node in call.inputs}
    results = [registers[node] for node in graph.results]
    steps = [
        (
            call.compute,
            [registers[node] for node in call.inputs],
            [registers[n] for n in call.inputs if last[n] is call and _is_free(graph, n)],
            [registers[node] for node in call.outputs],
        )
        for call in calls
    ]
    unused = [registers[n] for n in graph.inputs if n not in last and n not in graph.results]
    constants = list(graph.constants.values())
    count = sum(len(call.outputs) for call in calls)

    def run(values: list[Tensor]) -> Sequence[Tensor]:
        held: list[Any] = [*values, *constants, *([None] * count)]
        values.clear()
        for register in unused:
            held[register] = None
        for compute, takes, frees, gives in steps:
            arguments = [held[register] for register in takes]
            for register in frees:
                held[register] = None
            for register, value in zip(gives, compute(arguments), strict=True):
                held[register] = value
        return [held[register] for register in results]

    return run


def _is_free(graph: _SplitGraph, node: fx.Node) -> bool:
    """True if a value need not be held behind its last use by a part."""
    return node not in graph.constants and node not in graph.results


def _operation(node: fx.Node, name: Callable[[fx.Node], object]) -> Any:
    """An operator and its arguments, with names in place of nodes; hashable."""
    named = map_arg((node.args, node.kwargs), lambda argument: f"%{name(argument)}")
    return node.target, repr(named)


def _layout(value: Any) -> Any:
    """What code is compiled for: of a tensor its type, sizes and strides."""
    if not isinstance(value, Tensor):
        return value
    return value.dtype, value.device, tuple(value.shape), value.stride()


def _constant(value: Any, is_written: bool) -> Any:
    """Equal for constants that code may have in it: numbers on the host by value, others by id."""
    is_number = isinstance(value, Tensor) and not value.dim() and value.device.type == "cpu"
    return (value.dtype, repr(value.item())) if is_number and not is_written else id(value)


def _memory(value: Tensor) -> int:
    """Equal for tensors that share memory."""
    memory: int = value.untyped_storage()._cdata
    return memory


def _overwritten(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that an operator writes to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    schema = node.target._schema
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.kwargs.get(argument.name)
            if index < len(node.args):
                value = node.args[index]
            yield from (leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, fx.Node))
