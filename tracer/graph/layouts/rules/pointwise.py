"""Rules of ops that work entry by entry, with broadcasting.

All ops that torch tags as pointwise share one rule; a table says which of them are linear.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from ..cases import Answer, Case, Operand, Rule, Shape
from ..factors import NOT_LINEAR, Dims, Factors, Linear, each, jointly
from ..solution import solve

_ATEN = torch.ops.aten


def broadcast(shapes: Sequence[Shape], result: Shape) -> tuple[tuple[Dims, ...], Dims]:
    """The dimensions of operands that are broadcast to a result, and those of the result.

    Args:
        shapes: the shapes of the operands.
        result: the shape of the result.
    """
    result_dims = tuple((f"d{i}",) for i in range(len(result)))
    return tuple(_aligned(shape, result) for shape in shapes), result_dims


def _aligned(shape: Shape, result: Shape) -> Dims:
    first = len(result) - len(shape)
    return tuple(
        (f"d{first + i}",) if size == result[first + i] else () for i, size in enumerate(shape)
    )


def pointwise(
    case: Case, linear: Linear = NOT_LINEAR, moves: bool = False, zeros: Linear = NOT_LINEAR
) -> Answer:
    """Lay an op out by the cuts of its operands: all are cut alike; copies are sliced for that.

    Args:
        case: the op.
        linear: the operands in which it is linear.
        moves: whether it only moves entries.
        zeros: operands for whose zeros it gives zeros, though it is not linear in them.
    """
    result = case.shape()
    operand_dims, result_dims = broadcast([operand.shape for operand in case.operands], result)
    sizes = {f"d{i}": size for i, size in enumerate(result)}
    results = tuple(None if shape is None else result_dims for shape in case.shapes)
    factors = Factors(operand_dims, results, sizes, linear, moves=moves, zeros=zeros)
    return solve(case, factors)


def _sum_of_tensors(case: Case) -> Linear:
    return jointly(0, 1) if len(case.operands) == 2 else NOT_LINEAR


def _product(case: Case) -> Linear:
    return each(*range(len(case.operands)))


def _first(case: Case) -> Linear:
    return each(0)


def _scaled(case: Case) -> Linear:
    """A quotient; rows that are zero on some ranks divide nothing."""
    is_divided_by_rows = any(divisor.routing is not None for divisor in case.operands[1:])
    is_rounded = case.arguments.get("rounding_mode") is not None
    return NOT_LINEAR if is_rounded or is_divided_by_rows else each(0)


def _choice(case: Case) -> Linear:
    return jointly(1, 2)


def _masked(case: Case) -> Linear:
    return each(0) if case["value"] == 0 else NOT_LINEAR


def _keeps_all(before: torch.dtype, after: torch.dtype) -> bool:
    """True if a type has all numbers of another one; torch knows no promotion of float8."""
    if before == after or before.itemsize == 1:
        return before == after or after.itemsize > 1
    return after.itemsize > 1 and torch.promote_types(before, after) is after


def _cast(case: Case) -> Linear:
    """A cast between floating types.

    A cast to a narrower type is of the sum, and not of its summands, which might be too large for
    the type. The summands of a parameter's gradient are cast: they are added up in the parameter's
    type, over all microbatches. Of rows of experts one summand is the sum.
    """
    if not case.operands:  # torch.vmap casts a number that is a factor of a value
        return NOT_LINEAR
    (operand,) = case.operands
    to: torch.dtype = case["dtype"] or operand.dtype
    if not operand.is_floating or not (to.is_floating_point or to.is_complex):
        return NOT_LINEAR
    keeps_all = _keeps_all(operand.dtype, to)
    is_one = operand.routing is not None and operand.layout.summands == operand.routing.cut.axes
    return each(0) if keeps_all or case.stays_a_sum or is_one else NOT_LINEAR


_MOVES = frozenset(
    {
        *(_ATEN.clone.default, _ATEN.alias.default, _ATEN.detach.default),
        _ATEN.lift_fresh_copy.default,  # a constant of the method; torch 2.11 traces it as a copy
    }
)

_LINEAR: Mapping[object, Callable[[Case], Linear]] = {
    _ATEN.add.Tensor: _sum_of_tensors,
    _ATEN.sub.Tensor: _sum_of_tensors,
    _ATEN.rsub.Tensor: _sum_of_tensors,
    _ATEN.mul.Tensor: _product,
    _ATEN.mul.Scalar: _first,
    _ATEN.div.Tensor: _scaled,
    _ATEN.div.Scalar: _scaled,
    _ATEN.div.Tensor_mode: _scaled,
    _ATEN.add_.Tensor: _sum_of_tensors,
    _ATEN.mul_.Tensor: _first,
    _ATEN.mul_.Scalar: _first,
    _ATEN.div_.Tensor: _scaled,
    _ATEN.div_.Scalar: _scaled,
    _ATEN.neg.default: _first,
    _ATEN.clone.default: _first,
    _ATEN.alias.default: _first,
    _ATEN.detach.default: _first,
    _ATEN.lift_fresh_copy.default: _first,
    _ATEN._to_copy.default: _cast,
    _ATEN.where.self: _choice,
    _ATEN.masked_fill.Scalar: _masked,
    _ATEN.native_dropout_backward.default: _first,
    _ATEN.sigmoid_backward.default: _first,
    _ATEN.tanh_backward.default: _first,
    _ATEN.silu_backward.default: _first,
    _ATEN.gelu_backward.default: _first,
    _ATEN.threshold_backward.default: _first,
    _ATEN.hardtanh_backward.default: _first,
    _ATEN.leaky_relu_backward.default: _first,
    _ATEN.elu_backward.default: _first,
    _ATEN.hardswish_backward.default: _first,
    _ATEN.hardsigmoid_backward.default: _first,
    _ATEN.softplus_backward.default: _first,
    _ATEN.mish_backward.default: _first,
    _ATEN.softshrink_backward.default: _first,
    _ATEN.hardshrink_backward.default: _first,
    _ATEN._prelu_kernel_backward.default: _first,
}

_ZEROS = frozenset(
    {
        *(_ATEN.silu.default, _ATEN.gelu.default, _ATEN.relu.default, _ATEN.tanh.default),
        *(_ATEN.leaky_relu.default, _ATEN.elu.default, _ATEN.mish.default),
        *(_ATEN.hardswish.default, _ATEN.softshrink.default, _ATEN.hardshrink.default),
        *(_ATEN.abs.default, _ATEN.sgn.default, _ATEN.sign.default, _ATEN.erf.default),
        *(_ATEN.sin.default, _ATEN.expm1.default, _ATEN.log1p.default, _ATEN.sqrt.default),
    }
)
"""Ops of one tensor that give zero for zero, though they are not linear."""


_BOUNDS = {
    _ATEN.clamp.default: ("min", "max"),
    _ATEN.hardtanh.default: ("min_val", "max_val"),
}
"""Ops that keep entries between two numbers, the names of which stand here."""


def _zeros(case: Case) -> Linear:
    """The operands for whose zeros an op gives zeros, besides those in which it is linear."""
    if case.target in _ZEROS:
        return each(0)
    if case.target is _ATEN.pow.Tensor_Scalar:
        return each(0) if case["exponent"] > 0 else NOT_LINEAR
    if case.target in _BOUNDS:
        least, most = (case[name] for name in _BOUNDS[case.target])
        has_zero = (least is None or least <= 0) and (most is None or most >= 0)
        return each(0) if has_zero else NOT_LINEAR
    return NOT_LINEAR


_UNTAGGED = (
    *(_ATEN._to_copy.default, _ATEN.alias.default, _ATEN.detach.default, _ATEN.copy_.default),
    *(_ATEN.masked_fill.Tensor, _ATEN.fill.Scalar, _ATEN.fill_.Scalar, _ATEN.zero_.default),
    *(_ATEN.hardtanh_backward.default, _ATEN.hardswish_backward.default),
    *(_ATEN.leaky_relu_backward.default, _ATEN.elu_backward.default, _ATEN.rsub.Tensor),
    _ATEN.lift_fresh_copy.default,
    *(_ATEN.softplus_backward.default, _ATEN.hardsigmoid_backward.default, _ATEN.polar.default),
    *(_ATEN.complex.default, _ATEN.floor_divide.default, _ATEN.native_dropout_backward.default),
    *(_ATEN.mish_backward.default, _ATEN.softshrink_backward.default, _ATEN.hardswish.default),
    *(_ATEN.hardshrink_backward.default, _ATEN._prelu_kernel.default, _ATEN._conj.default),
    *(_ATEN._prelu_kernel_backward.default, _ATEN.fill_.Tensor, _ATEN.masked_fill_.Scalar),
    *(_ATEN.masked_fill_.Tensor, _ATEN.copy.default),
)
"""Ops that work entry by entry, but that torch does not tag as pointwise."""


def rule(case: Case) -> Answer:
    """The rule of ops that work entry by entry."""
    linear = _LINEAR.get(case.target)
    kinds = NOT_LINEAR if linear is None else linear(case)
    return pointwise(case, kinds, case.target in _MOVES, _zeros(case))


def is_pointwise(target: torch._ops.OpOverload) -> bool:
    """True if torch says that an op works entry by entry, and it draws no random numbers."""
    tags = target.tags
    if target is _ATEN.equal.default:  # torch's tag is wrong: the op gives one bool for all entries
        return False
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


RULES: Mapping[object, Rule] = dict.fromkeys(_UNTAGGED, rule)

_OF_TWO_KINDS = frozenset({"max", "min", "where"})
"""Ops that work entry by entry in some overloads only."""


@functools.cache
def is_entrywise(target: torch._ops.OpOverload) -> bool:
    """True if an op works entry by entry, in any form: also in place, or on lists."""
    if is_pointwise(target) or target in RULES:
        return True
    space, _, name = target._schema.name.partition("::")
    family = name.removeprefix("_foreach_").removesuffix("_")
    packet = getattr(_ATEN, family, None) if space == "aten" else None
    if not isinstance(packet, torch._ops.OpOverloadPacket) or family in _OF_TWO_KINDS:
        return False
    names = packet.overloads()  # type: ignore[no-untyped-call]
    forms = [getattr(packet, overload) for overload in names]
    return any(is_pointwise(form) or form in RULES for form in forms)


def operand(case: Case, name: str) -> Operand | None:
    """An argument that is a tensor; None if the op is called without it."""
    value = case.arguments[name]
    return value if isinstance(value, Operand) else None
