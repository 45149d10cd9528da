"""Rules of products of tokens with the matrices of their experts, and of groups of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .....ir.layout import Intervals, shape_of, whole
from ....values.experts import EXPERT_LINEAR, EXPERT_OUTER, GROUPED_MM
from ..cases import Answer, Case, LocalOp, Rule
from ..cuts import is_interval
from ..factors import Factors, each, letters, sizes_of, solve
from .creation import zeros

_ATEN = torch.ops.aten


def _expert_linear(case: Case) -> Answer:
    """Tokens may be cut anywhere. If experts are cut, a rank gives zeros for those of others."""
    factors = _factors(case, {2: "ti,eoi,tk->tko", 3: "tki,eoi,tk->tko"}[_rank(case, "input")])
    if not is_interval(case["weight"].cuts[0]):
        factors = replace(factors, keep={"e": "is packed"})
    return solve(case, factors, local=partial(_local_linear, case["weight"].shape[0]))


def _local_linear(experts: int, op: LocalOp) -> Any:
    weight = op.operands[1]
    if not all(shape_of(weight)):
        return zeros(op, op.arguments["input"])
    return op.run(**_own(op, weight[0], experts))


def _own(op: LocalOp, here: Intervals, experts: int) -> dict[str, Any]:
    """Ids that count from the rank's first expert; those of others are beyond its experts."""
    ((first, last),) = here
    ids = op.arguments["ids"]
    if last - first == experts:
        return {}
    return {"ids": op.emit(_ATEN.sub.Tensor, ids, first), "partial": True}


def _expert_outer(case: Case) -> Answer:
    """The gradient of weights: tokens are summed over ranks, and experts computed where asked."""
    left, right = ({2: "t", 3: "tk"}[_rank(case, name)] for name in ("left", "right"))
    factors = _factors(case, f"{left}o,{right}i,tk->eoi")
    factors = replace(factors, sizes={**factors.sizes, "e": case.shape()[0]})
    return solve(case, factors, local=partial(_local_outer, case.shape()[0]), free={0: "e"})


def _local_outer(experts: int, op: LocalOp) -> Any:
    region = op.results[0]
    assert region is not None
    if not all(shape_of(region)):
        return zeros(op, op.arguments["left"])
    here, *others = region
    if len(here) > 1:
        return op.piece(op.run(), (here, *whole(shape_of(tuple(others)))))
    return op.run(experts=here[0][1] - here[0][0], **_own(op, here, experts))


def _rank(case: Case, name: str) -> int:
    return len(case[name].shape)


def _factors(case: Case, text: str) -> Factors:
    operands, results = letters(text)
    sizes = sizes_of(operands, [operand.shape for operand in case.operands])
    return Factors(operands, results, sizes, each(0, 1))


def _grouped_mm(case: Case) -> Answer:
    """Groups end at given rows, so rows and groups stay whole; the other dimensions may be cut."""
    ranks = (_rank(case, "left"), _rank(case, "right"))
    text = {(2, 3): "gk,ekn,e->gn", (3, 2): "emk,kg,e->mg", (2, 2): "mg,gn,e->emn"}[ranks]
    keep = {"g": "is grouped", "e": "has the groups"}
    return solve(case, replace(_factors(case, text), keep=keep))


RULES: Mapping[object, Rule] = {
    EXPERT_LINEAR: _expert_linear,
    EXPERT_OUTER: _expert_outer,
    GROUPED_MM: _grouped_mm,
}
