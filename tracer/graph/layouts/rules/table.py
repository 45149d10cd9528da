"""The rule of each op: one of ours, one that a user has declared, or torch's decomposition."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .....ir.location import Location
from .. import asked, recurrences
from ..attention import flex_rules
from ..cases import LayoutError, Rule
from ..functional import other_form
from . import (
    attention,
    convolution,
    creation,
    decomposed,
    einsum,
    indexing,
    joining,
    losses,
    normalization,
    pointwise,
    random_draws,
    reductions,
    rows,
    views,
)

_FAMILIES = (
    asked,
    flex_rules,
    recurrences,
    *(
        attention,
        einsum,
        convolution,
        creation,
        indexing,
        joining,
        losses,
        normalization,
    ),
    *(pointwise, random_draws, reductions, rows, views),
)

RULES: Mapping[object, Rule] = {
    op: rule for family in _FAMILIES for op, rule in family.RULES.items()
}

VIEWS = frozenset(views.RULES) - views.SELECTING
"""Ops that give all entries of their operand, and no others."""

LINEAR: frozenset[object] = VIEWS | {
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.mul.Scalar,
    torch.ops.aten.div.Tensor,
    torch.ops.aten.div.Scalar,
    torch.ops.aten.neg.default,
    torch.ops.aten.sum.dim_IntList,
}
"""Cheap ops that are linear in each operand that may be a sum over ranks."""


def rule_of(target: object, loc: Location | None) -> Rule:
    """The rule of an op.

    Args:
        target: the target of a node.
        loc: the user's line, for the error.

    Raises:
        LayoutError: the target is no operator of torch.
    """
    rule = RULES.get(target)
    if rule is not None:
        return rule
    if isinstance(target, torch._ops.OpOverload):
        declared = einsum.declared_rule(target)
        if declared is not None:
            return declared
        form = other_form(target)  # an op in place has the rule of its form that makes a new tensor
        if form in RULES:
            return RULES[form]
        return pointwise.rule if pointwise.is_pointwise(target) else decomposed.rule
    raise LayoutError(
        f"{target} is no operator of torch, so nothing says what it does with tensors that are cut",
        loc=loc,
        remedy="call it in a method of an actor that is on one rank",
    )
