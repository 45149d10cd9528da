"""What a traced call may return: strided tensors, and plain Python values that never change."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...ir.location import Location
from ..errors import TraceError
from ..heap.kinds import SCALARS
from ..step.specs import Leaf, Static, TensorSpec, ir_dtype


def describe(leaf: Any, what: str, loc: Location | None) -> Leaf:
    """The spec of one leaf of a result.

    Raises:
        TraceError: a graph cannot return it.
    """
    if not isinstance(leaf, torch.Tensor):
        if isinstance(leaf, SCALARS):
            return Static(leaf)
        raise TraceError(
            f"{what} cannot be traced: it returns an object of type {type(leaf).__qualname__}",
            loc=loc,
            remedy="return tensors and plain Python values in tuples, lists or dicts; or mark the "
            "method with @cg.opaque, and its result travels as an object",
        )
    if not isinstance(leaf, FakeTensor):
        raise TraceError(
            f"{what} cannot be traced: it returns a tensor that was made outside it",
            loc=loc,
            remedy="keep the tensor in an attribute of the actor, or pass it as an argument",
        )
    if leaf.layout is not torch.strided:
        raise TraceError(
            f"{what} cannot be traced: it returns a tensor of layout {leaf.layout}",
            loc=loc,
            remedy="return a dense tensor (x.to_dense())",
        )
    try:
        ir_dtype(leaf.dtype)
    except ValueError as error:
        raise TraceError(f"{what} cannot be traced: {error}", loc=loc) from None
    return TensorSpec(leaf.dtype, tuple(leaf.shape), leaf.requires_grad)
