"""The rule of each op."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ....ir.location import Location
from ..cases import LayoutError, Rule
from . import (
    attention,
    contractions,
    convolution,
    creation,
    indexing,
    joining,
    normalization,
    pointwise,
    random_draws,
    reductions,
    softmax_and_losses,
    views,
)

_FAMILIES = (
    *(attention, contractions, convolution, creation, indexing, joining, normalization, pointwise),
    *(random_draws, reductions, softmax_and_losses, views),
)

RULES: Mapping[object, Rule] = {
    op: rule for family in _FAMILIES for op, rule in family.RULES.items()
}

VIEWS = frozenset(views.RULES) - views.SELECTING
"""Ops that give all entries of their operand, and nothing else."""


def rule_of(target: object, loc: Location | None) -> Rule:
    """The rule of an op.

    Raises:
        LayoutError: it has none.
    """
    rule = RULES.get(target)
    if rule is not None:
        return rule
    if isinstance(target, torch._ops.OpOverload) and pointwise.is_pointwise(target):
        return pointwise.rule
    name = str(target).removesuffix(".default")
    raise LayoutError(
        f"{name} has no rule that says what it does with tensors that are cut",
        loc=loc,
        remedy="call it where its operands are whole; or add a rule for it to a module of "
        "tracer/layouts/rules, whose RULES name its op",
    )
