"""The operators that run a cell over time, as they stand in graphs, and their gradient.

`cg::recurrence` gives the hidden states of all steps, the last states, and what its gradient takes.
`cg::recurrence_backward` gives the gradients of gates and states, and `cg::step_products` and
`cg::step_sums` those of weights and biases: other operators, which a schedule may put off. Each
loops over the steps when it runs, so a graph has one of them for any number of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...operator_library import defined
from ...values.operators import OperatorFunction
from .loops import LoopResults, gradients_of_run, run, step_products, step_sums
from .recurrent_cells import CELLS, CellWeights


def _forward(
    cell: str,
    gates: Tensor,
    states: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    reverse: bool,
) -> list[Tensor]:
    result = run(cell, gates, states, CellWeights(weight, bias, projection), reverse)
    return [result.hidden, *result.last, *result.kept]


def _forward_fake(
    cell: str,
    gates: Tensor,
    states: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    reverse: bool,
) -> list[Tensor]:
    length, rows, width = gates.shape
    kind = CELLS[cell]
    kept = kind.widths(width // kind.gates, gates.device)
    return [
        gates.new_empty(length, rows, states[0].shape[1]),
        *(gates.new_empty(state.shape) for state in states),
        *(gates.new_empty(length, rows, size) for size in kept),
    ]


def _backward(
    cell: str,
    gradients: Sequence[Tensor | None],
    hidden: Tensor,
    kept: Sequence[Tensor],
    states: Sequence[Tensor],
    weight: Tensor,
    projection: Tensor | None,
    reverse: bool,
) -> list[Tensor]:
    forward, weights = LoopResults(hidden, (), tuple(kept)), CellWeights(weight, None, projection)
    result = gradients_of_run(cell, gradients, forward, states, weights, reverse)
    projected = () if result.projected is None else (result.projected,)
    return [*result.gates, *projected, *result.states]


def _backward_fake(
    cell: str,
    gradients: Sequence[Tensor | None],
    hidden: Tensor,
    kept: Sequence[Tensor],
    states: Sequence[Tensor],
    weight: Tensor,
    projection: Tensor | None,
    reverse: bool,
) -> list[Tensor]:
    gates = (*hidden.shape[:2], len(weight))
    return [
        *(hidden.new_empty(gates) for _ in range(CELLS[cell].terms)),
        *(() if projection is None else (hidden.new_empty(hidden.shape),)),
        *(hidden.new_empty(state.shape) for state in _by_terms(cell, states)),
    ]


def _by_terms(cell: str, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The states, with the hidden state once for each term of its gradient."""
    return (*(states[0] for _ in range(CELLS[cell].terms)), *states[1:])


def _flops(cell: str, *shapes: Any, out_shape: Any = None, **named: Any) -> int:
    """The products of all steps with the hidden state's weight, and with the projection."""
    steps = out_shape[0]
    matrices = [shape for shape in shapes[-4:] if isinstance(shape, torch.Size) and len(shape) == 2]
    return 2 * int(steps[0] * steps[1]) * sum(map(torch.Size.numel, matrices))


def _flops_of_products(gradients: Any, values: Any, *others: Any, **named: Any) -> int:
    steps, rows, width = gradients
    return 2 * int(steps * rows * width * values[2])


RECURRENCE = defined(
    "recurrence(str cell, Tensor gates, Tensor[] states, Tensor weight, Tensor? bias, "
    "Tensor? projection, bool reverse) -> Tensor[]",
    _forward,
    _forward_fake,
    flops=_flops,
)
RECURRENCE_BACKWARD = defined(
    "recurrence_backward(str cell, Tensor?[] gradients, Tensor hidden, Tensor[] kept, "
    "Tensor[] states, Tensor weight, Tensor? projection, bool reverse) -> Tensor[]",
    _backward,
    _backward_fake,
    flops=_flops,
)
STEP_PRODUCTS = defined(
    "step_products(Tensor gradients, Tensor values, Tensor? first, bool reverse) -> Tensor",
    step_products,
    lambda gradients, values, *_: gradients.new_empty(gradients.shape[2], values.shape[2]),
    flops=_flops_of_products,
)
STEP_SUMS = defined(
    "step_sums(Tensor gradients, bool reverse) -> Tensor",
    step_sums,
    lambda gradients, reverse: gradients.new_empty(gradients.shape[2]),
)


class _Recurrence(OperatorFunction):
    """A loop over time as autograd sees it: takes gates, a weight, a bias, a projection, states.

    It takes the hidden state once for each term of its gradient. So autograd adds the terms one by
    one to what is there, as it does for torch's own operators.
    """

    @staticmethod
    def forward(
        ctx: Any,
        cell: str,
        reverse: bool,
        gates: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        projection: Tensor | None,
        *by_terms: Tensor,
    ) -> tuple[Tensor, ...]:
        states = by_terms[CELLS[cell].terms - 1 :]
        results = RECURRENCE(cell, gates, states, weight, bias, projection, reverse)
        ctx.set_materialize_grads(False)
        ctx.cell, ctx.reverse, ctx.states = cell, reverse, len(states)
        ctx.save_for_backward(gates, weight, bias, projection, *states, *results)
        return tuple(results[: 1 + len(states)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # a checkpoint gives them once
        operands, results = saved[: 4 + ctx.states], saved[4 + ctx.states :]
        terms = CELLS[ctx.cell].terms
        needed = (*ctx.needs_input_grad[2:6], *ctx.needs_input_grad[5 + terms :])
        if torch.is_grad_enabled():
            return (None, None, *_by_autograd(ctx, operands, needed, gradients))
        return (None, None, *_by_operators(ctx, operands, needed, results, gradients))


def _by_operators(
    ctx: Any,
    operands: Sequence[Any],
    needed: Sequence[bool],
    results: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
) -> Iterator[Tensor | None]:
    """The gradients of gates, weight, bias, projection and states."""
    _, weight, _, projection, *states = operands
    hidden, kept = results[0], results[1 + len(states) :]
    computed = RECURRENCE_BACKWARD(
        ctx.cell, gradients, hidden, kept, states, weight, projection, ctx.reverse
    )
    gates, share = computed[0], computed[CELLS[ctx.cell].terms - 1]
    yield gates
    yield STEP_PRODUCTS(share, hidden, states[0], ctx.reverse) if needed[1] else None
    yield STEP_SUMS(share, ctx.reverse) if needed[2] else None
    if needed[3]:  # an LSTM's: what was projected is computed again
        activated, memory = kept
        unprojected = activated.chunk(4, 2)[3] * memory.tanh()
        yield STEP_PRODUCTS(computed[CELLS[ctx.cell].terms], unprojected, None, ctx.reverse)
    else:
        yield None
    yield from computed[-len(_by_terms(ctx.cell, states)) :]


def _by_autograd(
    ctx: Any,
    operands: Sequence[Any],
    needed: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """The same, for a gradient that is differentiated: all steps again, as autograd records them.

    They take aliases of the operands, since one operand may depend on another.
    """
    aliases: list[Any] = [None if x is None else x.view_as(x) for x in operands]
    gates, weight, bias, projection, *states = aliases
    result = run(ctx.cell, gates, states, CellWeights(weight, bias, projection), ctx.reverse)
    pairs = [
        (tensor, gradient)
        for tensor, gradient in zip((result.hidden, *result.last), gradients, strict=True)
        if gradient is not None
    ]
    sources = [alias for alias, is_needed in zip(aliases, needed, strict=True) if is_needed]
    outputs, cotangents = zip(*pairs, strict=True)
    computed = iter(
        torch.autograd.grad(outputs, sources, cotangents, create_graph=True, allow_unused=True)
    )
    whole = [next(computed) if is_needed else None for is_needed in needed]
    terms = CELLS[ctx.cell].terms
    return (*whole[:4], *[None] * (terms - 1), *whole[4:])


def recurrence(
    cell: str,
    gates: Tensor,
    states: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None = None,
    projection: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run a cell over time.

    Args:
        cell: `lstm`, `gru`, `rnn_tanh` or `rnn_relu`.
        gates: the input's share of the gates, `[T, B, gates * H]`.
        states: the first states: a hidden state, `[B, P]`, and an LSTM's memory, `[B, H]`.
        weight: the weight of the hidden state, `[gates * H, P]`.
        bias: its bias, `[gates * H]`.
        projection: the weight of an LSTM's projection, `[P, H]`; without one, `P` is `H`.
        reverse: whether the last step is the first.

    Returns:
        The hidden states after each step, `[T, B, P]`, and the states after the last one.
    """
    operands = (gates, weight, bias, projection, *_by_terms(cell, states))
    hidden, *last = _Recurrence.apply(cell, reverse, *operands)  # type: ignore[no-untyped-call]
    return hidden, tuple(last)
