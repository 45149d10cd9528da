"""Tensors that a step makes from nothing: constants, the same in every execution."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ...ir.attributes import Symbol
from ...ir.location import Location
from ...ir.ops import Constant
from ..errors import TraceError
from ..step.arguments import check_static
from ..step.session import Session
from ..step.specs import TensorSpec, ir_type
from ..step.unsupported_ops import Function
from ..step.values import ObjectValue, TracedTensor

_RANDOM = frozenset({"rand", "randn", "randint", "randperm", "normal"})
_UNINITIALISED = frozenset({"empty", "empty_strided", "empty_permuted"})
_FILLS: dict[str, float] = {"zeros": 0, "ones": 1}


def is_random(name: str) -> bool:
    """True if a function makes tensors from nothing that differ from execution to execution."""
    return name in _RANDOM or name in _UNINITIALISED


def make_constants(
    session: Session,
    func: Function,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    what: str,
    loc: Location | None,
) -> Any:
    """Call a torch function that takes no value of the step; its tensors become constants.

    Raises:
        TraceError: it takes real tensors, or asks for a device or a gradient.
    """
    for leaf in tree_leaves((args, kwargs)):
        check_static(leaf, what, loc)
    kwargs = _without_device(kwargs, what, loc)
    if kwargs.get("requires_grad"):
        raise TraceError(
            f"{what} with requires_grad=True would make a new leaf for gradients in the step",
            loc=loc,
            remedy="let parameters live in actors, and call cg.backward(loss)",
        )
    fill = _fill(name, args, kwargs)
    if fill is not None:
        shape = func(*args, **{**kwargs, "device": "meta"})
        if isinstance(shape, torch.Tensor) and not shape.dtype.is_complex:
            return _filled(session, shape, fill, name, loc)
    result = func(*args, **kwargs)
    return tree_map(lambda leaf: _stored(session, leaf, name, what, loc), result)


def _without_device(kwargs: dict[str, Any], what: str, loc: Location | None) -> dict[str, Any]:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        raise TraceError(
            f"{what} names the device {device}; a value of the step is where its users are",
            loc=loc,
            remedy="leave the device out",
        )
    return {name: value for name, value in kwargs.items() if name != "device"}


def _fill(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    if name in _FILLS:
        return _FILLS[name]
    if name != "full":
        return None
    value = kwargs["fill_value"] if "fill_value" in kwargs else args[1]
    plain = isinstance(value, int | float) and not math.isnan(value)
    return value if plain else None


def _filled(
    session: Session, shape: torch.Tensor, fill: float, name: str, loc: Location | None
) -> Any:
    dtype = shape.dtype
    typed = (
        bool(fill) if dtype is torch.bool else float(fill) if dtype.is_floating_point else int(fill)
    )
    return _emit(session, TensorSpec(dtype, tuple(shape.shape)), name, loc, fill=typed)


def _stored(session: Session, leaf: Any, name: str, what: str, loc: Location | None) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.layout is not torch.strided:
        raise TraceError(
            f"{what} makes a tensor that is not dense",
            loc=loc,
            remedy="keep sparse tensors in actors",
        )
    ref = session.constant_names.fresh(f"constant.{name}")
    session.constants[ref] = leaf
    spec = TensorSpec(leaf.dtype, tuple(leaf.shape))
    return _emit(session, spec, name, loc, ref=Symbol(ref))


def _emit(
    session: Session, spec: TensorSpec, base: str, loc: Location | None, **attributes: Any
) -> TracedTensor | ObjectValue:
    try:
        type_ = ir_type(spec, session.everywhere)
    except ValueError as error:
        raise TraceError(str(error), loc=loc, remedy="use another dtype") from None
    value = session.new_value(base, type_)
    session.emit(Constant((), (value,), loc=loc, mb=session.mb, **attributes))
    return session.hold(value, spec)
