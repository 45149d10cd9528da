"""Tensors that a step makes without operands: constants, the same in every execution."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ....ir.attributes import Symbol
from ....ir.ops import Constant
from ...errors import TraceError
from ...values.specs import TensorSpec, ir_type
from ...values.values import ObjectValue, TracedTensor
from ..session.arguments import check_static
from ..session.session import Session
from ..session.unsupported_ops import TorchCall

_RANDOM = frozenset({"rand", "randn", "randint", "randperm", "normal"})
_UNINITIALISED = frozenset({"empty", "empty_strided", "empty_permuted"})
_FILLS: dict[str, float] = {"zeros": 0, "ones": 1}


def is_random(name: str) -> bool:
    """True if a function makes tensors without operands that differ in each execution."""
    return name in _RANDOM or name in _UNINITIALISED


def make_constants(session: Session, call: TorchCall) -> Any:
    """Call a torch function that takes no value of the step; its tensors become constants.

    Raises:
        TraceError: the function takes real tensors, names a device other than the CPU, sets
            `requires_grad`, or makes a tensor of an unsupported dtype or layout.
    """
    for leaf in tree_leaves((call.args, call.kwargs)):
        check_static(leaf, call.shown, call.loc)
    kwargs = dict(call.kwargs)
    device = kwargs.pop("device", None)
    if device is not None and torch.device(device).type != "cpu":
        raise TraceError(
            f"{call.shown} names the device {device}; a value of the step is where its users are",
            loc=call.loc,
            remedy="leave the device out",
        )
    if kwargs.get("requires_grad"):
        raise TraceError(
            f"{call.shown} with requires_grad=True would make a new leaf for gradients in the step",
            loc=call.loc,
            remedy="let parameters live in actors, and call cg.backward(loss)",
        )
    fill = _fill(call)
    if fill is not None:
        shape = call.func(*call.args, **{**kwargs, "device": "meta"})
        if isinstance(shape, torch.Tensor) and not shape.dtype.is_complex:
            dtype = shape.dtype
            kind = bool if dtype is torch.bool else float if dtype.is_floating_point else int
            return _emit(session, shape, call, fill=kind(fill))
    return tree_map(lambda leaf: _stored(session, leaf, call), call.func(*call.args, **kwargs))


def _fill(call: TorchCall) -> float | None:
    if call.name in _FILLS:
        return _FILLS[call.name]
    if call.name != "full":
        return None
    value = call.kwargs["fill_value"] if "fill_value" in call.kwargs else call.args[1]
    plain = isinstance(value, int | float) and not math.isnan(value)
    return value if plain else None


def _stored(session: Session, leaf: Any, call: TorchCall) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.layout is not torch.strided:
        raise TraceError(
            f"{call.shown} makes a tensor that is not dense",
            loc=call.loc,
            remedy="keep sparse tensors in actors",
        )
    ref = session.constant_names.fresh(f"constant.{call.name}")
    session.constants[ref] = leaf
    return _emit(session, leaf, call, ref=Symbol(ref))


def _emit(
    session: Session, tensor: torch.Tensor, call: TorchCall, **attributes: Any
) -> TracedTensor | ObjectValue:
    spec = TensorSpec(tensor.dtype, tuple(tensor.shape))
    try:
        type_ = ir_type(spec, session.everywhere)
    except ValueError as error:
        raise TraceError(str(error), loc=call.loc, remedy="use another dtype") from None
    value = session.new_value(call.name, type_)
    session.emit(Constant((), (value,), loc=call.loc, mb=session.mb, **attributes))
    return session.hold(value, spec)
