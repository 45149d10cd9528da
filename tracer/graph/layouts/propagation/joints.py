"""Lay out a joint graph: gradients end as what they are the gradients of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from .....ir.layout import Layout
from .....ir.types import Place
from ....method.joint import Joint
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
) -> Propagation:
    """Lay out a method and its derivative.

    The cotangent of an output is laid out as the output; where that was a sum over ranks, it is a
    copy on each of them. A gradient ends in the layout of its tensor. That of an input is
    transferred to it as the input was, and where a part was taken of a copy, the gradients of the
    parts are gathered. That of a parameter may be a sum over ranks along the axes that do not cut
    it; it is not gathered, since the parameter can be cut as it is.

    Args:
        joint: the graph.
        place: the ranks.
        state: layouts of parameters and buffers by path; the others are copies.
        inputs: of the values that the method takes; None: copies.
        outputs: as `propagate` takes them, of the values that the method gives.
        pins, allowed: as `propagate` takes them.

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
    locations = joint.recorder.locations
    return propagate(
        joint.graph,
        place,
        layouts,
        ends=ends,
        like=like,
        pins=pins,
        allowed=allowed,
        locations=locations,
    )


def _like(layouts: Mapping[fx.Node, Layout], node: fx.Node) -> Layout:
    """The layout of a tensor that a gradient is of."""
    return layouts.get(node, whole(node.meta["val"].dim()))
