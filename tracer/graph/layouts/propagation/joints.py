"""Lay out a joint graph: each gradient ends in the layout of its tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from .....ir.layout import Layout
from .....ir.types import Place
from ....method.joint_graph import Joint
from ..cases import whole
from ..change import DEFAULT, Change
from ..versions import End, Propagation
from .propagate import propagate


def propagate_joint(
    joint: Joint,
    place: Place,
    state: Mapping[str, Layout],
    inputs: Sequence[Layout | None],
    *,
    outputs: Sequence[End] = (),
    pins: Mapping[fx.Node, Layout] | None = None,
    allowed: frozenset[Change] = DEFAULT,
    attention: str | None = None,
    sequence: Collection[str] = (),
) -> Propagation:
    """Lay out a method and its derivative.

    The cotangent of an output is cut as the output is; where the output was a sum over ranks, each
    rank has a copy of the cotangent. A gradient ends in the layout of its tensor. The gradient of
    an input gets there by any transfer: if ranks took slices of a copy, the gradients of the slices
    are gathered. The gradient of a parameter may stay a sum over ranks, along the axes that do not
    cut the parameter. It is not gathered, since the plan can cut the parameter as its gradient is.

    Args:
        joint: the graph.
        place: the ranks.
        state: layouts of parameters and buffers, by path; those without one are copies.
        inputs: layouts of the method's inputs; None: copies.
        outputs: ends of the method's outputs, as `propagate` takes them.
        pins, allowed, attention, sequence: as `propagate` takes them.

    Returns:
        The joint graph with a layout for each value.

    Raises:
        LayoutError: an op has no rule, or layouts contradict each other.
    """
    layouts = {node: state[tensor.path] for node, tensor in joint.state if tensor.path in state}
    pairs = zip(joint.inputs, inputs, strict=True)
    layouts |= {node: layout for node, layout in pairs if layout is not None}
    differentiated = [joint.outputs[i] for i in joint.wanted_outputs] if joint.cotangents else []
    like = dict(zip(joint.cotangents, differentiated, strict=True))
    ends = [outputs[i] if i < len(outputs) else End() for i in range(len(joint.outputs))]
    ends += [End() for _ in joint.rebinds]
    sources = [joint.inputs[i] for i in joint.wanted_inputs]
    ends += [End(_like(layouts, node), is_asked=True) for node in sources]
    by_path = {tensor.path: node for node, tensor in joint.state}
    paths = [tensor.path for tensor, _ in joint.state_grads]
    ends += [End(_like(layouts, by_path[path]), summands=True, path=path) for path in paths]
    locations = joint.locations
    weights = [node for node, _ in joint.state] + [n for n in joint.inputs if _is_matrix(n)]
    computed = layouts | {**(pins or {})}
    cut = {a for n in weights if n in computed for c in computed[n].cuts for a in c.axes}
    return propagate(
        joint.graph,
        place,
        layouts,
        ends=ends,
        like=like,
        pins=pins,
        allowed=allowed,
        locations=locations,
        attention=attention,
        sequence=[axis for axis in sequence if axis in cut],  # others cut nothing but tokens
        weights=weights,
    )


def _is_matrix(node: fx.Node) -> bool:
    """True if an input may be a weight, such as one that another stage lends."""
    fake = node.meta["val"]
    return fake.dim() == 2 and bool(fake.is_floating_point())


def _like(layouts: Mapping[fx.Node, Layout], node: fx.Node) -> Layout:
    """The layout of the tensor whose gradient is computed."""
    return layouts.get(node, whole(node.meta["val"].dim()))
