"""From a piece of a graph to the source of a Python function, and to that function.

The source has a line for each operator. It calls operators without attribute look-ups, looks
parameters up where they live, and drops each value after its last use. The user's line is known for
each line of the source.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import linecache
import math
import operator
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx

from ....ir.location import Location
from ...method.node_memory import memory_of
from ...torch_modes import is_autocast_on
from ...values.actor_state import StateAttribute
from ..autodiff import products as sums
from ..autodiff.products import GradientProduct, find_products, is_expanded_for_products
from ..autodiff.subgraphs import Subgraph, results
from .accumulate import accumulate
from .bodies import Compiler, Compute, FusedBody, GraphBody, Locate, Run
from .constant_folding import fold_constants
from .direct_calls import call_of
from .fusible import make_fusible
from .generated_source import BodySources, GeneratedSource, SettledSources, SourceStore
from .last_uses import last_uses
from .locator import Locator, show
from .rooms import Rooms, rooms_of
from .strides import StrideComparison, compared, laid_out

_serial = itertools.count()
BODY = "BODY"
"""The name of the generated function in its own source."""

HELPERS: Mapping[str, Any] = {
    "GRAD_ON": torch.is_grad_enabled,
    "NO_GRAD": torch.no_grad,
    "AUTOCAST_ON": is_autocast_on,
    "AUTOCAST_ON_DEVICE": torch.is_autocast_enabled,
    "AUTOCAST": torch.autocast,
    "ACCUMULATE": accumulate,
    "ADD_PRODUCT": sums.add_product,
    "ADDING_TO": sums.adding_to,
    "LAID_OUT": laid_out,
}
"""What sources call besides operators."""

LARGE = 1 << 20
"""From this number of bytes on, a gradient is added to `.grad` at once, and not at the end."""


def make_body(piece: Subgraph, name: str, sources: BodySources) -> GraphBody:
    """The body of a piece. Its code is generated when it is needed.

    It takes the piece's inputs and returns a tuple: `(None,)` if nothing is returned. It runs under
    `torch.no_grad` and without autocast, whatever the caller's mode.

    Args:
        piece: the piece.
        name: the name of the function, for tracebacks.
        sources: the sources of a piece with the same graph, for any actor.
    """
    return _body(piece, name, sources, sources.plain)


def _body(
    piece: Subgraph,
    name: str,
    sources: BodySources,
    source: Callable[[], GeneratedSource],
    kind: type[GraphBody] = GraphBody,
) -> GraphBody:
    new_gradients: dict[int, torch.Tensor] = {}
    return kind(
        generate=lambda: _generate(source(), piece, name, new_gradients),
        nodes=piece.nodes,
        state=_SlotTensors([tensor.slots[0] for tensor in piece.reads]),
        trained=_SlotTensors([gradient.tensor.slots[0] for gradient in piece.gradients]),
        new_gradients=new_gradients,
        rebinds=bool(piece.rebinds),
        refit=functools.partial(_refit, piece, name, sources),
    )


def sources_of(piece: Subgraph, store: SourceStore | None = None) -> BodySources:
    """The sources of a piece's bodies.

    Args:
        piece: the piece.
        store: has sources of an earlier start; None: there are none.
    """

    def write(is_adding: bool, names: frozenset[str] | None) -> GeneratedSource:
        writer = _BodyWriter(piece, find_products(piece) if is_adding else {})
        return _source(writer) if names is None else _written(writer, names)

    return BodySources(write, store)


def _refit(
    piece: Subgraph, name: str, sources: BodySources, compiler: Compiler | None
) -> GraphBody:
    if compiler is None:
        return _body(piece, name, sources, sources.adding)
    products = find_products(piece)
    fusible = make_fusible(piece, products)
    compute = compiler(fusible.module, fusible.examples)

    def source() -> GeneratedSource:
        return _source(_BodyWriter(piece, products, compute))

    return _body(piece, name, sources, source, FusedBody)


def _source(writer: _BodyWriter) -> GeneratedSource:
    if not writer.strides:
        return _written(writer, frozenset())
    settled = SettledSources(lambda names: _written(writer, names))
    return replace(_written(writer, None), settled=settled)


def _written(writer: _BodyWriter, names: frozenset[str] | None) -> GeneratedSource:
    """The source that lays out the results of these names; None: it compares all results."""
    writer.differing = names
    lines = list(writer.lines())
    text = "\n".join(line for line, _ in lines) + "\n"
    module = compile(text, "<cg>", "exec")
    (code,) = (constant for constant in module.co_consts if isinstance(constant, CodeType))
    holders = {writer.known(s.holder): number for number, s in enumerate(_slots(writer.piece))}
    locations = {i: loc for i, (_, loc) in enumerate(lines, start=1) if loc is not None}
    named = tuple((name, number) for name, number in holders.items() if name is not None)
    operators = dict(writer.operators)
    return GeneratedSource(text, code, writer.globals, operators, named, locations)


def _slots(piece: Subgraph) -> list[StateAttribute]:
    """The slots of the tensors that a body looks up, adds gradients to, or replaces."""
    tensors = (*piece.reads, *(gradient.tensor for gradient in piece.gradients))
    return [*(tensor.slots[0] for tensor in tensors), *piece.rebinds]


def _generate(
    source: GeneratedSource, piece: Subgraph, name: str, new_gradients: dict[int, torch.Tensor]
) -> tuple[Run, Locate]:
    file = f"<cg {name} #{next(_serial)}>"
    shown = "cg_" + re.sub(r"\W", "_", name)
    slots = _slots(piece)
    # C code that imports something, such as a warning's filter, uses the caller's `__builtins__`.
    names = source.globals | {"__builtins__": builtins, "MADE": new_gradients}
    names |= {held: slots[number].holder for held, number in source.holders}
    code = source.code.replace(co_filename=file, co_name=shown, co_qualname=shown)
    run = names[BODY] = FunctionType(code, names, shown)
    show(file, source.text)
    weakref.finalize(run, linecache.cache.pop, file, None)
    locator = Locator(run.__code__, source.locations)
    if source.settled is not None:
        # `settle` empties this list, so that it does not keep the writer of the source alive.
        settled: list[SettledSources] = [source.settled]
        function = weakref.ref(run)

        def settle(differing: frozenset[str]) -> None:
            target = function()
            if settled and target is not None:
                new = settled.pop()(differing)
                names.update({k: v for k, v in new.globals.items() if k not in names})
                target.__code__ = new.code.replace(
                    co_filename=file, co_name=shown, co_qualname=shown
                )
                locator.add(target.__code__, new.locations)
                show(file, new.text)

        comparison = StrideComparison(settle)
        names |= {"COMPARE": comparison.compare, "COMPARED": comparison.end}
    return run, locator


class _SlotTensors:
    """The tensors that some slots hold now."""

    def __init__(self, slots: Sequence[StateAttribute]) -> None:
        self._slots = slots

    def __call__(self) -> list[torch.Tensor]:
        return [slot.get() for slot in self._slots]


_Line = tuple[str, Location | None]


class _BodyWriter:
    """Writes the source of one body; `globals` holds what the source refers to.

    Args:
        piece: the piece.
        products: gradients that are products, by index; they are added by the product itself.
        compute: computes the whole graph in a single call; None: a line for each operator.

    Attributes:
        operators: the operators for which names of `globals` stand.
        strides: the strides of the trace, for the results whose strides matter.
        differing: names of the results that are laid out; None: all are compared.
    """

    def __init__(
        self,
        piece: Subgraph,
        products: Mapping[int, GradientProduct],
        compute: Compute | None = None,
    ) -> None:
        self.piece = piece
        self.globals: dict[str, Any] = {**HELPERS, "COMPUTE": compute}
        self.operators: dict[str, torch._ops.OpOverload] = {}
        self._products = products
        self._is_fused = compute is not None
        self._known: dict[int, str] = {}
        self._constants = fold_constants(piece.graph) if compute is None else {}
        self._last_use = last_uses(piece.graph, self._constants)
        rooms = rooms_of(piece.graph, self._constants) if compute is None else Rooms()
        self._rooms = rooms.of
        self._early = self._early_gradients() if compute is None else {}
        self._passed = {n for product in products.values() for n in product.nodes}
        self._passed |= {*self._constants, *rooms.filled}
        every = compared(piece) if compute is None else {}
        self.strides = {n: s for n, s in every.items() if n not in self._passed}
        self.differing: frozenset[str] | None = frozenset()
        nodes = [n for n in piece.graph.nodes if n.op == "placeholder"]
        self._state = nodes[: len(piece.reads)]
        self._inputs = nodes[len(piece.reads) :]

    def lines(self) -> Iterator[_Line]:
        """The lines of the source, each with the user's line."""
        arguments = "INPUTS" if self._is_fused else self._names(self._inputs)
        yield f"def {BODY}({arguments}):", None
        yield from ((text, None) for text in self._prelude(arguments))
        yield from self._statements()
        yield from ((text, None) for text in self._epilogue())

    def _statements(self) -> Iterator[_Line]:
        products, locations = self._products, self.piece.locations
        if self._is_fused:
            yield from ((text, None) for text in self._call())
            return
        adds = {product.nodes[0]: index for index, product in products.items()}
        for node in self.piece.graph.nodes:
            text = None
            if node in adds:
                factors = [self._literal(factor) for factor in products[adds[node]].factors]
                text = self._add_product(adds[node], factors)
            elif node.op in ("call_function", "get_attr") and node not in self._passed:
                text = f"    {self._statement(node)}{self._layout(node)}"
            if text is not None:
                drop = ", ".join(n.name for n in self._last_use.get(node, ()))
                yield f"{text}; del {drop}" if drop else text, locations.get(node)
            for index, gradient in self._early.get(node, ()):
                yield f"{self._accumulate([index], [gradient.name])}; del {gradient.name}", None

    def _layout(self, node: fx.Node) -> str:
        """The statement behind a result that gives it the strides of the trace, or none."""
        name, strides = node.name, self.strides.get(node)
        if strides is None:
            return ""
        if self.differing is None:
            return f"; {name} = COMPARE({name!r}, {name}, {strides})"
        return f"; {name} = LAID_OUT({name}, {strides})" if name in self.differing else ""

    def _call(self) -> Iterator[str]:
        """The call that computes the graph. Only its list holds the inputs meanwhile."""
        yield f"    VALUES = [{self._names((*self._state, *self._inputs))}]"
        if self._inputs:
            yield f"    del {self._names(self._inputs)}"
        added = ", ".join(map(self._parameter, self._products))
        call = f"ADDING_TO([{added}], MADE, COMPUTE, VALUES)" if added else "COMPUTE(VALUES)"
        yield f"    RESULTS = {call}"

    def _names(self, nodes: Iterable[fx.Node]) -> str:
        return ", ".join(node.name for node in nodes)

    def _add_product(self, index: int, factors: Sequence[str]) -> str:
        product = ", ".join((*factors, str(self._products[index].is_transposed)))
        return f"    ADD_PRODUCT({self._parameter(index)}, {product}, MADE)"

    def _parameter(self, index: int) -> str:
        """The parameter of a gradient, in the source."""
        return self._slot(self.piece.gradients[index].tensor.slots[0])

    def _early_gradients(self) -> dict[fx.Node, list[tuple[int, fx.Node]]]:
        """Large gradients, by the last node that uses their memory.

        They are added behind it, so that they are not held until all gradients are there.
        """
        piece = self.piece
        values = results(piece.graph)
        first = len(piece.gives) + len(piece.rebinds)
        large = {
            node: index
            for index, node in enumerate(values[first:])
            if values.count(node) == 1 and node.op == "call_function" and _nbytes(node) >= LARGE
        }
        last: dict[int | None, fx.Node] = {}
        for node in piece.graph.nodes:
            if node.op != "output":
                last |= dict.fromkeys(map(memory_of, (node, *node.all_input_nodes)), node)
        early: dict[fx.Node, list[tuple[int, fx.Node]]] = {}
        for node, index in large.items():
            early.setdefault(last[memory_of(node)], []).append((index, node))
        shared = {memory_of(v) for v in values if v not in large}
        return {
            at: [
                (index, node)
                for index, node in gradients
                if memory_of(node) not in shared and index not in self._products
            ]
            for at, gradients in early.items()
        }

    def _accumulate(self, indices: Sequence[int], gradients: Sequence[str]) -> str:
        chosen = [self.piece.gradients[index] for index in indices]
        owned = self._global(tuple(g.owned for g in chosen))
        params = ", ".join(self._slot(g.tensor.slots[0]) for g in chosen)
        return f"    ACCUMULATE([{params}], [{', '.join(gradients)}], {owned}, MADE)"

    def _prelude(self, arguments: str) -> Iterator[str]:
        again = f"return {BODY}({arguments})"
        yield "    if GRAD_ON():"
        yield f"        with NO_GRAD(): {again}"
        devices = sorted(_devices(self.piece.graph))
        if devices:
            yield "    if AUTOCAST_ON():"  # for any device, which costs less than for one
        for device in devices:
            yield f"        if AUTOCAST_ON_DEVICE({device!r}):"
            yield f"            with AUTOCAST({device!r}, enabled=False): {again}"
        if self._is_fused:
            if self._inputs:
                yield f"    {self._names(self._inputs)}, = INPUTS"
            yield "    INPUTS.clear()"
        for node, dense in zip(self._inputs, self.piece.dense, strict=True):
            if dense:
                name = node.name
                yield f"    if not {name}.is_contiguous(): {name} = {name}.contiguous()"
        for node, tensor in zip(self._state, self.piece.reads, strict=True):
            yield f"    {node.name} = {self._slot(tensor.slots[0])}"

    def _slot(self, slot: StateAttribute) -> str:
        within = "".join(f"[{i}]" for i in slot.within)
        return f"{self._global(slot.holder)}[{self._literal(slot.key)}]{within}"

    def _statement(self, node: fx.Node) -> str:
        """The statement that computes a node."""
        room = self._rooms.get(node)
        if room is None:
            return f"{node.name} = {self._expression(node)}"
        values = [room.takes] if room.takes else []
        values += [self._literal(value) for value in node.args[len(values) :]]
        values += [f"{key}={self._literal(value)}" for key, value in node.kwargs.items()]
        target = node.target if room.takes else room.form
        return room.statement(node.name, lambda more: self._call_of(target, [*values, *more]))

    def _expression(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            assert isinstance(node.target, str)
            return self._global(operator.attrgetter(node.target)(self.piece.owner))
        if node.target is operator.getitem:
            value, index = node.args
            return f"{self._literal(value)}[{self._literal(index)}]"
        args = [self._literal(a) for a in node.args]
        args += [f"{k}={self._literal(v)}" for k, v in node.kwargs.items()]
        text = self._call_of(node.target, args)
        # Otherwise each product would copy the expanded matrix for itself.
        return f"{text}.contiguous()" if is_expanded_for_products(node) else text

    def _call_of(self, target: Any, args: Sequence[str]) -> str:
        """The call of an operator."""
        name = self._global(call_of(target))
        if isinstance(target, torch._ops.OpOverload):
            self.operators[name] = target
        return f"{name}({', '.join(args)})"

    def _epilogue(self) -> Iterator[str]:
        piece = self.piece
        values = self._values()
        returned, rest = values[: len(piece.gives)], values[len(piece.gives) :]
        for slot, value in zip(piece.rebinds, rest, strict=False):
            yield f"    {self._slot(slot)} = {value}"
        gradients = rest[len(piece.rebinds) :]
        early = {index for entries in self._early.values() for index, _ in entries}
        late = [i for i in range(len(gradients)) if i not in early and i not in self._products]
        if late:
            yield self._accumulate(late, [gradients[index] for index in late])
        if self.differing is None:
            yield "    COMPARED()"
        yield f"    return ({', '.join(returned) or None},)"

    def _values(self) -> list[str]:
        """The results of the graph, in the source."""
        if self._is_fused:
            return [f"RESULTS[{index}]" for index in range(len(results(self.piece.graph)))]
        return [self._literal(v) for v in results(self.piece.graph)]

    def _literal(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            constant = self._constants.get(value)
            return value.name if constant is None else self._global(constant)
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if type(value) is float and math.isfinite(value):
            return repr(value)
        if isinstance(value, (list, fx.immutable_collections.immutable_list)):
            return "[" + ", ".join(map(self._literal, value)) + "]"
        if type(value) is tuple:
            return "(" + "".join(f"{self._literal(v)}, " for v in value) + ")"
        return self._global(value)

    def known(self, value: Any) -> str | None:
        """The name by which the source refers to a value; None if it does not."""
        return self._known.get(id(value))

    def _global(self, value: Any) -> str:
        known = self._known.get(id(value))
        if known is None:
            known = self._known[id(value)] = f"G{len(self._known)}"
            self.globals[known] = value
        return known


def _nbytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.nbytes if isinstance(value, torch.Tensor) and not value.is_sparse else 0


def _devices(graph: fx.Graph) -> set[str]:
    values = (node.meta.get("val") for node in graph.nodes)
    return {v.device.type for v in values if isinstance(v, torch.Tensor)} or {"cpu"}
