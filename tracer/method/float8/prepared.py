"""The weights of a joint graph that are prepared outside of it, once for many calls.

With one scale for each tensor, a method's graph begins with the greatest magnitude of each weight,
and with the weight cast to float8. Both depend on the weights alone. Where ranks hold pieces,
the magnitudes are a vector that an actor's ranks compute once, and stored weights are cast before
they are gathered. The graph then takes the vector and the casts as it takes state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ...values.actor_state import StateAttribute, StateTensor
from ..joint import Joint

MAXIMA = "float8.maxima"
"""The path that stands for the vector of greatest magnitudes."""

_ATEN = torch.ops.aten


def cast_path(path: str) -> str:
    """The path that stands for the cast of the weight at a path."""
    return f"{path}.float8"


@dataclass(frozen=True)
class _WeightUse:
    """A use of a weight in a graph.

    Attributes:
        maximum: the node of its greatest magnitude.
        cast: the node of the weight in float8.
        between: the nodes that serve these two alone.
    """

    maximum: fx.Node
    cast: fx.Node
    between: tuple[fx.Node, ...]


def prepared(joint: Joint, weights: Sequence[str], stored: Collection[str]) -> Joint:
    """The joint graph, which takes what is prepared of its weights.

    Args:
        joint: the graph; it is not changed.
        weights: the paths of the actor's weights with one scale, in the order of the vector.
        stored: the paths of those whose cast is prepared, too.

    Returns:
        The joint graph with further placeholders of state; `joint` itself if it uses none of the
        weights. Weights that the method changes stay in the graph.
    """
    changed = joint.written | joint.backward_written
    rebound = {id(rebind.tensor) for rebind, _ in joint.rebinds}
    numbers = {path: number for number, path in enumerate(weights)}
    tensors = {tensor.path: tensor for _, tensor in joint.state}
    found = [
        (tensor, use)
        for index, (node, tensor) in enumerate(joint.state)
        if tensor.path in numbers and index not in changed and id(tensor) not in rebound
        for use in _uses(node)
    ]
    if not found:
        return joint
    writer = _Writer(joint)
    sources = tuple(tensors[path] for path in weights)
    vector = writer.state(
        _derived(MAXIMA, sources), found[0][1].maximum, (len(weights),), torch.float32
    )
    for tensor, use in found:
        writer.select(use.maximum, vector, numbers[tensor.path])
        if tensor.path in stored:
            writer.instead(use.cast, _derived(cast_path(tensor.path), (tensor,)))
    writer.erase(node for _, use in found for node in reversed(use.between))
    return writer.joint()


def _derived(path: str, sources: tuple[StateTensor, ...]) -> StateTensor:
    """What stands for a value that is computed from tensors of the state."""
    slot = StateAttribute(None, None, (), path)
    return StateTensor(sources[0].tensor, [slot], sources=sources)


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
            if not _descends(scaled.args[1], maximum):
                continue
            (bounded,) = scaled.users
            (cast,) = bounded.users
            own = () if wide is weight else (wide,)
            yield _WeightUse(maximum, cast, (magnitude, maximum, *own, scaled, bounded, cast))


def _descends(node: Any, ancestor: fx.Node) -> bool:
    """True if a node is computed from another one, operand by first operand."""
    while isinstance(node, fx.Node) and node is not ancestor and node.op == "call_function":
        node = next(iter(node.all_input_nodes), None)
    return node is ancestor


class _Writer:
    """Writes the graph that takes what is prepared."""

    def __init__(self, joint: Joint) -> None:
        self._joint = joint
        self._graph = fx.Graph(joint.owner)
        self._of: dict[fx.Node, fx.Node] = {}
        self._graph.output(self._graph.graph_copy(joint.graph, self._of))
        self._forward: set[str] = set(joint.forward)
        self._state: dict[str, tuple[fx.Node, StateTensor]] = {}
        first = next(n for n in self._graph.nodes if n.op != "placeholder")
        self._first = first

    def state(
        self, tensor: StateTensor, like: fx.Node, shape: tuple[int, ...], dtype: torch.dtype
    ) -> fx.Node:
        """A placeholder, on the device of a node of the joint graph; one for each path."""
        if tensor.path not in self._state:
            with self._graph.inserting_before(self._first):
                node = self._graph.placeholder(tensor.path.replace(".", "_"))
            node.meta["val"] = like.meta["val"].new_empty(shape, dtype=dtype)
            self._forward.add(node.name)
            self._state[tensor.path] = node, tensor
        return self._state[tensor.path][0]

    def select(self, maximum: fx.Node, vector: fx.Node, number: int) -> None:
        """Take a weight's greatest magnitude from the vector."""
        old = self._of[maximum]
        with self._graph.inserting_before(old):
            new = self._graph.call_function(_ATEN.select.int, (vector, 0, number))
        new.meta["val"] = vector.meta["val"].select(0, number)
        self._forward.add(new.name)
        old.replace_all_uses_with(new)

    def instead(self, cast: fx.Node, tensor: StateTensor) -> None:
        """Take a weight's cast as it is prepared."""
        fake = cast.meta["val"]
        new = self.state(tensor, cast, tuple(fake.shape), fake.dtype)
        self._of[cast].replace_all_uses_with(new)

    def erase(self, nodes: Iterator[fx.Node]) -> None:
        """Erase the nodes that nothing uses any more."""
        for node in dict.fromkeys(nodes):
            if not self._of[node].users:
                self._graph.erase_node(self._of[node])

    def joint(self) -> Joint:
        """The joint graph on the new one."""
        joint, of = self._joint, self._of
        return replace(
            joint,
            graph=self._graph,
            forward=frozenset(self._forward),
            state=(*((of[n], t) for n, t in joint.state), *self._state.values()),
            inputs=tuple(of[n] for n in joint.inputs),
            cotangents=tuple(of[n] for n in joint.cotangents),
            outputs=tuple(of[n] for n in joint.outputs),
            rebinds=tuple((rebind, of[n]) for rebind, n in joint.rebinds),
            input_grads=tuple(of[n] for n in joint.input_grads),
            state_grads=tuple((tensor, of[n]) for tensor, n in joint.state_grads),
        )
