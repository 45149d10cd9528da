"""Ring attention: blocks of keys and values go from rank to rank while others are computed with.

A step of the ring is an op of the graph, attention with the block that a rank has in that step. So
blocks travel by transfers of layouts: in step i a rank has the block of the rank i positions ahead
of it, which is a cut with a shift (`Cut.shift`). A transfer from one shift to the next is a message
from each rank to its neighbour. The graph is cut into parts behind these transfers, as
behind all others, and a step begins behind the start of the next one's messages (`Answer.is_late`).

Results of steps are joined by the logarithms of their sums of exponentials
(https://arxiv.org/abs/2310.01889). In the backward, gradients of keys and values travel with them,
one step behind, and end where the keys are. They are added up in the accumulation type.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry, register_flop_formula

from .....ir.layout import Region
from ....method.dropout.dropout_operators import DROPOUT_ATTENTION, DROPOUT_ATTENTION_BACKWARD
from ....operator_library import defined
from ..cases import LocalOp, Shape
from ..values.accumulation import accumulated

_ATEN = torch.ops.aten
_ROWS = 2
"""The dimension of rows in queries, keys, values and statistics."""

FORWARDS = (
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    DROPOUT_ATTENTION,
)
"""The kernels of attention."""

BACKWARDS = (
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
    _ATEN._scaled_dot_product_flash_attention_backward.default,
    _ATEN._scaled_dot_product_efficient_attention_backward.default,
    _ATEN._scaled_dot_product_cudnn_attention_backward.default,
    DROPOUT_ATTENTION_BACKWARD,
)
"""Their derivatives."""


def _defined(kernel: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The op of a step: a kernel with the number of the step, and a value that it begins behind.

    It has no kernel of its own: ranks run the one of `kernel`.
    """
    _, _, text = str(kernel._schema).partition("::")
    name, _, rest = text.removeprefix("_").partition("(")
    arguments, arrow, results = rest.rpartition(") -> ")
    schema = f"{name}_step({arguments}, int step=0, Tensor? behind=None{arrow}{results}"

    def fake(*args: Any, step: int = 0, behind: Tensor | None = None, **kwargs: Any) -> Any:
        return kernel(*args, **kwargs)

    op = defined(schema, None, fake)
    formula = flop_registry.get(kernel.overloadpacket)
    if formula is not None:
        register_flop_formula(op.overloadpacket, get_raw=True)(partial(_flops, formula))
    return op


def _flops(
    formula: Callable[..., int],
    *args: Any,
    step: int = 0,
    behind: Tensor | None = None,
    **kwargs: Any,
) -> int:
    """The operations of all steps together, since an op does not know how many there are."""
    return formula(*args, **kwargs)


KERNELS: Mapping[torch._ops.OpOverload, torch._ops.OpOverload] = {
    _defined(kernel): kernel for kernel in (*FORWARDS, *BACKWARDS)
}
"""The kernel of each op of a step."""

_STEPS = {kernel: step for step, kernel in KERNELS.items()}


ADD = defined("add_to_block(Tensor moving, Tensor own) -> Tensor", None, operator.add)
"""Adds a gradient that travels with a block to what a rank has computed for the block."""


@dataclass(frozen=True)
class StepOp:
    """The kernel of a step, as one rank runs it; implements `LocalOp`."""

    step: LocalOp

    @property
    def target(self) -> torch._ops.OpOverload:
        return KERNELS[self.step.target]

    @property
    def arguments(self) -> Mapping[str, Any]:
        names = {argument.name for argument in self.target._schema.arguments}
        return {name: value for name, value in self.step.arguments.items() if name in names}

    @property
    def operands(self) -> tuple[Region, ...]:
        count = sum(isinstance(value, fx.Node) for value in self.arguments.values())
        return self.step.operands[:count]

    @property
    def results(self) -> tuple[Region | None, ...]:
        return self.step.results

    @property
    def shapes(self) -> tuple[Shape | None, ...]:
        return self.step.shapes

    @property
    def fakes(self) -> tuple[Any, ...]:
        return self.step.fakes

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.step.emit(target, *args, **kwargs)

    def run(self, /, **changed: Any) -> fx.Node:
        values = {**self.arguments, **changed}
        args, kwargs = [], {}
        for argument in self.target._schema.arguments:
            if argument.kwarg_only:
                kwargs[argument.name] = values[argument.name]
            else:
                args.append(values[argument.name])
        return self.step.emit(self.target, *args, **kwargs)

    def piece(self, node: fx.Node, region: Region) -> fx.Node:
        return self.step.piece(node, region)


def forward_of_ring(
    kernel: torch._ops.OpOverload, steps: int, statistics_shape: Shape
) -> Callable[..., Any]:
    """Attention in steps, at logical shapes.

    Args:
        kernel: one of `FORWARDS`.
        steps: the number of ranks.
        statistics_shape: the shape of the statistics; if it has no rows, nobody needs them.
    """

    def function(**arguments: Any) -> Any:
        if "compute_log_sumexp" in arguments:
            arguments["compute_log_sumexp"] = True
        first, known, *others = _STEPS[kernel](**arguments, step=0)
        out = accumulated(first)
        for step in range(1, steps):
            more, statistics, *_ = _STEPS[kernel](**arguments, step=step)
            out, known = _joined((out, known), (accumulated(more), statistics))
        if not statistics_shape[_ROWS]:
            known = known.new_zeros(statistics_shape)
        elif any(arguments.get(name) is not None for name in ("attn_mask", "attn_bias")):
            # A row that sees no key at all: with 0, its gradients are zeros.
            known = known.masked_fill(known == -math.inf, 0.0)
        return (out, known, *others)

    return function


def _joined(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The result and statistics of rows, from those of two sets of keys."""
    total = torch.logaddexp(one[1], other[1])
    finite = total.masked_fill(total == -math.inf, 0.0)
    result = None
    for out, statistics in (one, other):
        share = (statistics - finite).exp()
        if share.dim() < out.dim():
            share = share.unsqueeze(-1)
        result = out * share if result is None else result + out * share
    assert result is not None
    return result, total


def backward_of_ring(kernel: torch._ops.OpOverload, steps: int) -> Callable[..., Any]:
    """The derivative of attention in steps, at logical shapes.

    The gradients of a rank's own block do not travel: those of other ranks for this block are added
    when they come back.

    Args:
        kernel: one of `BACKWARDS`.
        steps: the number of ranks.
    """

    def function(**arguments: Any) -> Any:
        query, *own, others = _gradients(kernel, arguments, 0, None)
        moving: list[Tensor] = []
        for step in range(1, steps):
            behind = moving[0] if moving else None
            more, key, value, _ = _gradients(kernel, arguments, step, behind)
            query = query + more
            moving = _added(moving, [key, value])
        return (query, *_added(moving, own), *others)

    return function


def _added(moving: list[Tensor], own: list[Tensor]) -> list[Tensor]:
    """Gradients of a block with those that have come with it, if any have."""
    return [ADD(*pair) for pair in zip(moving, own, strict=True)] if moving else own


def _gradients(
    kernel: torch._ops.OpOverload, arguments: Mapping[str, Any], step: int, behind: Tensor | None
) -> Any:
    results = _STEPS[kernel](**arguments, step=step, behind=behind)
    return (*map(accumulated, results[:3]), results[3:])
