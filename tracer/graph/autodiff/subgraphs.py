"""Pieces of a joint graph: the nodes that are needed, copied into a graph of their own.

A piece takes state (read where it lives) and inputs, and gives outputs, new tensors for rebound
slots and gradients of the state. The values that it returns are contiguous and share no memory with
the state, so that a value of the step never changes under its reader.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ....ir.location import Location
from ....ir.types import TensorType, ValueType
from ...lazy import Lazy
from ...method.node_memory import memory_of, sharing, state_references
from ...method.purity.copy_node import copy_node
from ...values.actor_state import StateAttribute, StateTensor
from ...values.operators import is_random, writes_in_secret
from ...values.specs import ir_dtype


@dataclass(frozen=True)
class Gradient:
    """A gradient of the state that a piece computes.

    Attributes:
        tensor: the tensor of the state.
        owned: whether nothing else refers to its memory, so that `.grad` may take it over.
    """

    tensor: StateTensor
    owned: bool


_CHECKS = (torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg)


@dataclass(frozen=True)
class PieceNodes:
    """The graph of a piece.

    Attributes:
        graph: the graph.
        owner: holds the constants that `get_attr` nodes refer to.
        locations: the user's line of each node.
    """

    graph: fx.Graph
    owner: torch.nn.Module
    locations: Mapping[fx.Node, Location]


@dataclass(frozen=True)
class Subgraph:
    """A graph to run on its own.

    Its placeholders are the state, then the inputs. Its output is a tuple: the returned values,
    then a tensor for each rebind, then a tensor for each gradient.

    Attributes:
        nodes: the graph, which may not have been read yet.
        reads: the tensors of the state that are its first placeholders.
        takes: the types of its inputs, whose placeholders stand behind these.
        dense: for each input, whether it must be contiguous.
        gives: the types of the values that are returned.
        rebinds: slots that get a new tensor.
        gradients: the gradients that are added to `.grad`.
        aliases: pairs (returned value, input) that may share memory.
        draws: whether it draws random numbers.
        checks: whether it checks a value, as an assertion does.
        offloads: indices of the returned values that the user wants on the host while they rest.
    """

    nodes: Lazy[PieceNodes]
    reads: tuple[StateTensor, ...]
    takes: tuple[ValueType, ...]
    dense: tuple[bool, ...]
    gives: tuple[ValueType, ...]
    rebinds: tuple[StateAttribute, ...]
    gradients: tuple[Gradient, ...]
    aliases: tuple[tuple[int, int], ...]
    draws: bool
    checks: bool
    offloads: tuple[int, ...] = ()

    @property
    def graph(self) -> fx.Graph:
        return self.nodes.value.graph

    @property
    def owner(self) -> torch.nn.Module:
        return self.nodes.value.owner

    @property
    def locations(self) -> Mapping[fx.Node, Location]:
        return self.nodes.value.locations

    @property
    def graded(self) -> tuple[StateTensor, ...]:
        """The tensors to whose `.grad` it adds."""
        return tuple(gradient.tensor for gradient in self.gradients)

    def on(
        self,
        tensor_of: Callable[[StateTensor], StateTensor],
        slot_of: Callable[[StateAttribute], StateAttribute],
    ) -> Subgraph:
        """The piece for another instance, whose tensors and slots are these."""
        return replace(
            self,
            reads=tuple(map(tensor_of, self.reads)),
            rebinds=tuple(map(slot_of, self.rebinds)),
            gradients=tuple(replace(g, tensor=tensor_of(g.tensor)) for g in self.gradients),
        )

    def on_tensors(self, tensors: Iterable[StateTensor]) -> Subgraph:
        """The piece for another instance of its actor, which has these tensors."""
        of = {slot.path: (tensor, slot) for tensor in tensors for slot in tensor.slots}
        return self.on(lambda tensor: of[tensor.path][0], lambda slot: of[slot.path][1])


def results(graph: fx.Graph) -> Sequence[fx.Node]:
    """Return the nodes that a piece's graph gives."""
    (values,) = graph.output_node().args
    assert isinstance(values, (tuple, list))
    return values  # type: ignore[return-value]


def has_checks(graph: fx.Graph) -> bool:
    """True if a graph checks a value, as an assertion does."""
    return any(node.target in _CHECKS for node in graph.nodes)


def fake_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def type_of(node: fx.Node) -> TensorType:
    """The type of a node's tensor, without a place."""
    fake = fake_of(node)
    return TensorType(ir_dtype(fake.dtype), tuple(fake.shape))


def is_view(node: fx.Node) -> bool:
    """True if a node gives a view of its first argument, and takes no other tensor.

    For a view that is one of several results (as of `split`), its `getitem` is one as well.
    """
    if not node.args or not isinstance(node.args[0], fx.Node) or node.kwargs.get("out"):
        return False
    if len(node.all_input_nodes) != 1:
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    if target is torch.ops.aten._unsafe_view.default:
        return True
    first = target._schema.arguments[0].alias_info if target._schema.arguments else None
    return first is not None and all(r.alias_info is not None for r in target._schema.returns)


def written_in_place(node: fx.Node) -> fx.Node | None:
    """The argument that an in-place operator returns (`relu_(x)` is `x`), or None."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    returns, arguments = target._schema.returns, target._schema.arguments
    if len(returns) != 1 or returns[0].alias_info is None or not arguments:
        return None
    first = arguments[0].alias_info
    if first is None or not first.is_write or not isinstance(node.args[0], fx.Node):
        return None
    return node.args[0]


def live_nodes(graph: fx.Graph, roots: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that `roots` need, and all nodes with an effect, with the nodes that these need."""
    live = set(roots)
    for node in reversed(graph.nodes):
        if node.op == "output":
            continue
        if node in live or has_effect(node):
            live.add(node)
            live.update(node.all_input_nodes)
    return live


def has_effect(node: fx.Node) -> bool:
    """True if a node does something besides computing its value."""
    if node.op != "call_function":
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
        return True
    return (
        is_random(target, node.args, node.kwargs)
        or writes_in_secret(target, node.args, node.kwargs)
        or bool(node.is_impure(impure_random=False))
    )


class SubgraphBuilder:
    """Copies nodes of a joint graph into a graph of their own."""

    def __init__(self, locations: Mapping[str, Location]) -> None:
        self.graph = fx.Graph()
        self.locations: dict[fx.Node, Location] = {}
        self._by_name = locations
        self._copies: dict[fx.Node, fx.Node] = {}
        self._narrow: dict[fx.Node, fx.Node] = {}

    def placeholder(self, node: fx.Node) -> None:
        """Make an input of the new graph that stands for `node`."""
        new = self.graph.placeholder(node.name if node.name.isidentifier() else f"v_{node.name}")
        new.meta["val"] = node.meta.get("val")
        self._copies[node] = new

    def narrow_placeholder(self, node: fx.Node, dtype: torch.dtype) -> None:
        """Make an input that stands for `node` in another type, until `widen`."""
        self.placeholder(node)
        new = self._narrow[node] = self._copies.pop(node)
        new.meta["val"] = _as(fake_of(node), dtype)

    def is_narrow(self, node: fx.Node) -> bool:
        return node in self._narrow

    def widen(self, node: fx.Node) -> None:
        """Let the input that stands for `node`, in the type of `node`, be its copy."""
        self._copies[node] = self._converted(node, self._narrow[node], fake_of(node).dtype)

    def narrow(self, node: fx.Node, dtype: torch.dtype) -> None:
        """Compute the copy of a node in another type, right behind it."""
        self._narrow[node] = self._converted(node, self._copies[node], dtype)

    def narrowed(self, node: fx.Node) -> fx.Node:
        """The copy of a node in another type."""
        return self._narrow[node]

    def _converted(self, node: fx.Node, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        new = self._add(node, torch.ops.aten._to_copy.default, (source,), {"dtype": dtype})
        new.meta["val"] = _as(fake_of(node), dtype)
        return new

    def copy(self, node: fx.Node) -> None:
        """Copy a node whose arguments have been copied."""
        self._copies[node] = self._note(node, copy_node(self.graph, node, self._copies.__getitem__))

    def alias(self, node: fx.Node, by: fx.Node) -> None:
        """Let the copy of `by` stand for `node`."""
        self._copies[node] = self._copies[by]

    def has(self, node: fx.Node) -> bool:
        return node in self._copies

    def of(self, node: fx.Node) -> fx.Node:
        """The copy of a node."""
        return self._copies[node]

    def clone(self, node: fx.Node, *, dense: bool) -> fx.Node:
        """A copy of a node's tensor, with memory of its own.

        Args:
            node: the node of the joint graph, which has been copied.
            dense: whether to make it contiguous; else it keeps its strides where it can.
        """
        layout = torch.contiguous_format if dense else torch.preserve_format
        return self._add(
            node, torch.ops.aten.clone.default, (self._copies[node],), {"memory_format": layout}
        )

    def _add(
        self, at: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> fx.Node:
        return self._note(at, self.graph.call_function(target, args, kwargs))

    def _note(self, at: fx.Node, new: fx.Node) -> fx.Node:
        """Note the line of `at` as the line of a new node, and return the new node."""
        location = self._by_name.get(at.name)
        if location is not None:
            self.locations[new] = location
        return new


def _as(fake: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A new tensor like a fake one, in another type."""
    return torch.empty_like(fake, dtype=dtype)


def returned_values(
    builder: SubgraphBuilder,
    values: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    state: set[int | None],
) -> tuple[list[fx.Node], tuple[tuple[int, int], ...]]:
    """Make values fit to be returned: contiguous, no lazy conjugates, no reference to state.

    Args:
        values, inputs: nodes of the joint graph.
        state: memory of the state.

    Returns:
        The new nodes; the pairs (value, input) that may share memory.
    """
    references = state_references(values, state)
    cloned = {
        i
        for i, node in enumerate(values)
        if i in references or node.op == "get_attr" or not is_dense(node)
    }
    new = [
        builder.clone(node, dense=True) if i in cloned else builder.of(node)
        for i, node in enumerate(values)
    ]
    aliases = tuple((i, j) for i, j in sharing(values, inputs) if i not in cloned)
    return new, aliases


def is_dense(node: fx.Node) -> bool:
    """True if a node's tensor is contiguous, and not conjugated or negated lazily."""
    tensor = fake_of(node)
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def gradients_of(
    gradients: Iterable[tuple[StateTensor, fx.Node]],
    others: Iterable[fx.Node],
    elsewhere: Collection[int | None],
) -> tuple[Gradient, ...]:
    """The gradients of the state. A gradient is owned if nothing else refers to its memory.

    Args:
        gradients: tensors of the state, with the nodes of their gradients.
        others: all other results of the piece.
        elsewhere: memory of its inputs and of the state.
    """
    pairs = list(gradients)
    uses = Counter(map(memory_of, (*others, *(node for _, node in pairs))))
    return tuple(
        Gradient(
            tensor,
            owned=node.op == "call_function"
            and uses[memory_of(node)] == 1
            and memory_of(node) not in elsewhere,
        )
        for tensor, node in pairs
    )
