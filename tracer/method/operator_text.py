"""Write the operators of a joint graph down, as all ranks that trace one call should have them."""

from __future__ import annotations

import hashlib
import re
from operator import attrgetter

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from .joint_graph import Joint

_OWN = re.compile(r" at 0x[0-9a-f]+|, index=\d+")
"""What differs between processes that have the same graph: addresses, and numbers of devices."""


def operator_text(joint: Joint) -> str:
    """The operators of a joint graph, a line each, with their constants.

    The graph is of whole tensors, so it is the same on all ranks of a mesh, whatever their pieces
    are. It differs if Python has read a number that differs by rank.
    """
    return "\n".join(_line(joint, node) for node in joint.graph.nodes)


def _line(joint: Joint, node: fx.Node) -> str:
    if node.op == "get_attr":
        value = attrgetter(str(node.target))(joint.owner)
        return f"%{node.name} = constant {_digest(value)}"
    kwargs = ", ".join(f"{name}={value!r}" for name, value in node.kwargs.items())
    arguments = ", ".join([*map(repr, node.args), *([kwargs] if kwargs else [])])
    return _OWN.sub("", f"%{node.name} = {node.target}({arguments})")


def _digest(value: object) -> str:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return type(value).__name__
    with _disable_current_modes(), torch.no_grad(), torch._C.DisableTorchFunction():
        content = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {list(value.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
