"""The weights of a joint graph that are prepared outside of it, once for many calls.

With one scale for each tensor, a method's graph begins with the scale of each weight, and with the
weight cast to float8. Both depend on the weights alone. So the scales are a vector that an actor's
ranks compute once, and stored weights are cast before they are gathered. The graph then takes the
vector and the casts as it takes state.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from ..lazy import Lazy
from ..method.float8.formula import scales_of
from ..method.joint_graph import Joint, JointNodes
from ..values.actor_state import StateAttribute, StateTensor

SCALES = "float8.scales"
"""The path that stands for the vector of scales."""

_ATEN = torch.ops.aten


def cast_path(path: str) -> str:
    """The path that stands for the cast of the weight at a path."""
    return f"{path}.float8"


@dataclass(frozen=True)
class _WeightUse:
    """A use of a weight in a graph.

    Attributes:
        scale: the node of its scale.
        cast: the node of the weight in float8.
        between: the nodes that serve these two alone.
    """

    scale: fx.Node
    cast: fx.Node
    between: tuple[fx.Node, ...]


@dataclass(frozen=True)
class PreparedGraph:
    """The graph of a joint graph that takes what is prepared of its weights.

    Attributes:
        nodes: the new graph.
        weights: for each further placeholder of state, the indices of the weights that it is
            computed from.
    """

    nodes: Lazy[JointNodes]
    weights: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(joint: Joint, weights: Sequence[int]) -> PreparedGraph | None:
        """The graph; None if it uses none of the weights.

        Args:
            joint: the joint graph; it is not changed.
            weights: indices of the state: the actor's weights with one scale. A weight that the
                method changes stays in the graph.
        """
        changed = joint.written | joint.backward_written
        rebound = {id(rebind.tensor) for rebind in joint.rebound}
        uses = [
            (number, index, use)
            for number, index in enumerate(weights)
            if index not in changed and id(joint.tensors[index]) not in rebound
            for use in _uses(joint.nodes.value.state[index])
        ]
        if not uses:
            return None
        writer = _Writer(joint)
        scale = uses[0][2].scale
        twice = (*weights, *weights) if len(weights) == 1 else tuple(weights)
        vector = writer.state(twice, scale, (len(weights),), torch.float32)
        for number, index, use in uses:
            writer.select(use.scale, vector, number)
            writer.instead(use.cast, index)
        writer.erase(node for *_, use in uses for node in reversed(use.between))
        return writer.result()

    def applied(self, joint: Joint) -> Joint:
        """A joint graph, whose nodes are those of which this one was made, on the new graph."""
        tensors = joint.tensors
        further = (_derived(tuple(tensors[i] for i in indices)) for indices in self.weights)
        return replace(joint, nodes=self.nodes, tensors=(*tensors, *further), kept=None)


def _derived(sources: tuple[StateTensor, ...]) -> StateTensor:
    """A stand-in for the cast of one weight, or for the vector of several.

    The vector of a single weight has two sources, the weight twice.
    """
    path = SCALES if len(sources) > 1 else cast_path(sources[0].path)
    return StateTensor(sources[0].tensor, [StateAttribute(None, None, (), path)], sources=sources)


def _uses(weight: fx.Node) -> Iterator[_WeightUse]:
    """The uses of a weight in the formula of float8, as `formula.py` writes it."""
    for magnitude in weight.users:
        if magnitude.target is not _ATEN.abs.default:
            continue
        for maximum in magnitude.users:
            if maximum.target is _ATEN.amax.default and not maximum.args[1:]:
                yield from _casts(weight, magnitude, maximum)


def _casts(weight: fx.Node, magnitude: fx.Node, maximum: fx.Node) -> Iterator[_WeightUse]:
    wides = [n for n in weight.users if n.target is _ATEN._to_copy.default]
    for wide in (weight, *wides):
        for scaled in wide.users:
            if scaled.target is not _ATEN.mul.Tensor or scaled.args[0] is not wide:
                continue
            chain = _chain(scaled.args[1], maximum)
            if tuple(map(_operation, chain)) != _scale_operations():
                continue
            (bounded,) = scaled.users
            (cast,) = bounded.users
            own = () if wide is weight else (wide,)
            between = (magnitude, maximum, *chain, *own, scaled, bounded, cast)
            yield _WeightUse(chain[-1], cast, between)


def _chain(node: Any, ancestor: fx.Node) -> list[fx.Node]:
    """The nodes by which one is computed from another, each from its first operand, in order.

    Empty: it is not, or is that one.
    """
    nodes: list[fx.Node] = []
    while isinstance(node, fx.Node) and node is not ancestor and node.op == "call_function":
        nodes.insert(0, node)
        node = next(iter(node.all_input_nodes), None)
    return nodes if node is ancestor else []


@functools.cache
def _scale_operations() -> tuple[object, ...]:
    """What computes a weight's scale from its greatest magnitude: others may scale it, too."""
    traced = make_fx(lambda maximum: scales_of(maximum, torch.float8_e4m3fn))(
        torch.ones((), dtype=torch.float32)
    )
    return tuple(_operation(n) for n in traced.graph.nodes if n.op == "call_function")


def _operation(node: fx.Node) -> object:
    """An operator with all that it takes besides its first operand."""
    return node.target, node.args[1:], dict(node.kwargs)


class _Writer:
    """Writes the graph that takes what is prepared."""

    def __init__(self, joint: Joint) -> None:
        self._joint = joint
        self._graph = fx.Graph()
        self._of: dict[fx.Node, fx.Node] = {}
        self._graph.output(self._graph.graph_copy(joint.graph, self._of))
        self._forward: set[str] = set(joint.forward)
        self._state: dict[tuple[int, ...], fx.Node] = {}
        self._first = next(n for n in self._graph.nodes if n.op != "placeholder")

    def state(
        self, weights: tuple[int, ...], like: fx.Node, shape: tuple[int, ...], dtype: torch.dtype
    ) -> fx.Node:
        """The placeholder of what is computed from weights, on the device of a node."""
        if weights not in self._state:
            with self._graph.inserting_before(self._first):
                node = self._graph.placeholder("float8_weight" if len(weights) == 1 else "scales")
            node.meta["val"] = like.meta["val"].new_empty(shape, dtype=dtype)
            self._forward.add(node.name)
            self._state[weights] = node
        return self._state[weights]

    def select(self, scale: fx.Node, vector: fx.Node, number: int) -> None:
        """Take a weight's scale from the vector."""
        old = self._of[scale]
        with self._graph.inserting_before(old):
            new = self._graph.call_function(_ATEN.select.int, (vector, 0, number))
        new.meta["val"] = vector.meta["val"].select(0, number)
        self._forward.add(new.name)
        old.replace_all_uses_with(new)

    def instead(self, cast: fx.Node, weight: int) -> None:
        """Take a weight's cast as it is prepared."""
        fake = cast.meta["val"]
        new = self.state((weight,), cast, tuple(fake.shape), fake.dtype)
        self._of[cast].replace_all_uses_with(new)

    def erase(self, nodes: Iterator[fx.Node]) -> None:
        """Erase the nodes that nothing uses any more."""
        for node in dict.fromkeys(nodes):
            if not self._of[node].users:
                self._graph.erase_node(self._of[node])

    def result(self) -> PreparedGraph:
        """The graph as it is now."""
        copy, forward = self._of.__getitem__, frozenset(self._forward)
        further = tuple(self._state.values())
        nodes = self._joint.nodes.value.on(self._graph, forward, copy, copy, further)
        return PreparedGraph(Lazy.known(nodes), tuple(self._state))
