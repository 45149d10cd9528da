"""Sequence parallelism: axes that cut weights cut tokens between the layers of these weights, too.

Where a weight's outputs are cut, tokens are gathered, and where its inputs are, summands are
reduced to tokens. So norms, dropouts and residuals work on a rank's own tokens, and an all-gather
with a reduce-scatter stands where an all-reduce would: Korthikanti et al.,
https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from ....ir.layout import Cut
from .asked import ASKED, text_of_cuts
from .cases import Answer, Case, Expansion, Operand, Shape
from .cuts import CutProduct, spread
from .factors import Factor, Factors


def gathered_factor(case: Case, factors: Factors) -> Factor | None:
    """The factor of tokens that an op needs of all ranks; None if there is no such factor.

    An axis cuts it in one operand, and another factor in another. A weight's factor stays cut, and
    so does one that the result has beside a contracted one: gradients of weights contract tokens.
    """
    by_factor: dict[Factor, list[Operand]] = {}
    for dims, operand in zip(factors.operands, case.operands, strict=True):
        for dim, cut in zip(dims, operand.cuts, strict=True):
            if not case.sequence.intersection(cut.axes):
                continue
            cuts = spread(cut, [factors.sizes[factor] for factor in dim], case.sizes) or ()
            for factor, own in zip(dim, cuts, strict=False):
                if case.sequence.intersection(own.axes):
                    by_factor.setdefault(factor, []).append(operand)
    if len(by_factor) != 2:
        return None
    of_weights = {f for f, operands in by_factor.items() if any(o.is_weight for o in operands)}
    contracted = {f for f in by_factor if not _is_in_results(f, factors)}
    if len(of_weights) == 1:
        return next(factor for factor in by_factor if factor not in of_weights)
    if of_weights:  # tokens that are an input, on the left of a weight
        return next(iter(by_factor))
    return contracted.pop() if len(contracted) == 1 else None


def _is_in_results(factor: Factor, factors: Factors) -> bool:
    return all(dims is None or any(factor in dim for dim in dims) for dims in factors.results)


def reduced_to_tokens(case: Case, answer: Answer, rows: Shape) -> Expansion | None:
    """An op whose result is a sum over axes of the sequence, with the sum reduced to tokens.

    Args:
        case: the op, which has one result.
        answer: its layouts.
        rows: the sizes of what the first dimensions of the result are, the last one of tokens.

    Returns:
        None if its result is no such sum, or a gradient, whose terms are added up first.
    """
    layout = answer.results[0]
    is_of_weight = any(operand.is_weight for operand in case.operands)
    is_gradient = any(operand.is_gradient for operand in case.operands)
    if layout is None or case.asked is not None or is_gradient or not is_of_weight:
        return None
    if not rows or rows[-1] == 1:  # there are no tokens to cut
        return None
    axes = tuple(a for a in case.sizes if a in case.sequence and a in layout.summands)
    shape = case.shape()
    dims = next(n for n in range(len(shape) + 1) if math.prod(shape[:n]) == math.prod(rows))
    cuts = spread(layout.cuts[0], rows, case.sizes) if dims == 1 else layout.cuts[:dims]
    if not axes or cuts is None or isinstance(cuts[-1], CutProduct):
        return None
    last = replace(cuts[-1], axes=(*cuts[-1].axes, *axes)) if cuts[-1] else Cut(axes)
    text = text_of_cuts([*enumerate((*cuts[:-1], last, *layout.cuts[dims:]))])
    function = partial(_reduced, case.target, (*rows, *shape[dims:]), text)
    return Expansion(function, {case.target: (Cut(),) * len(shape)})


def _reduced(target: Any, shape: Shape, text: str, **arguments: Any) -> torch.Tensor:
    result: torch.Tensor = target(**arguments)
    reduced: torch.Tensor = ASKED(result.view(shape), text)
    return reduced.view(result.shape)


def rows_of_matrix(node: fx.Node) -> Shape:
    """The sizes of what the rows of a matrix are: those of the value that has been viewed so.

    Ops that work on rows one by one may stand between. Without a view, they are rows.
    """
    count: int = node.meta["val"].shape[0]
    while node.op == "call_function":
        if node.target is operator.getitem:
            node = node.all_input_nodes[0]
        source = next((n for n in node.all_input_nodes if _has_rows(n, count)), None)
        if source is None:
            break
        shape = tuple(source.meta["val"].shape)
        lead = next(n for n in range(1, len(shape) + 1) if math.prod(shape[:n]) == count)
        if lead > 1:
            return shape[:lead]
        node = source
    return (count,)


def _has_rows(node: fx.Node, count: int) -> bool:
    """True if the first dimensions of a tensor are so many rows."""
    fake = node.meta.get("val")
    if not isinstance(fake, torch.Tensor) or fake.dim() < 2:
        return False
    return any(math.prod(fake.shape[:n]) == count for n in range(1, fake.dim()))
