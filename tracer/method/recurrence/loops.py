"""Loops of a cell over time, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .recurrent_cells import CELLS, CellWeights


@dataclass(frozen=True)
class LoopResults:
    """The results of a loop over time. `T` is the number of steps, and `B` that of rows.

    Attributes:
        hidden: the hidden states after each step, `[T, B, P]`.
        last: the states after the last step, `[B, P]`, and `[B, H]` for a memory.
        kept: what the gradient takes besides them, each `[T, B, ...]`.
    """

    hidden: Tensor
    last: tuple[Tensor, ...]
    kept: tuple[Tensor, ...]


@dataclass(frozen=True)
class LoopGradients:
    """The gradients of a loop over time.

    Attributes:
        gates: those of the input's share of the gates, `[T, B, gates * H]`; then, if it differs,
            that of the hidden state's share.
        projected: those of the hidden states after their projection, `[T, B, P]`; None without
            one.
        states: the terms of that of the first hidden state; then those of the other first states.
    """

    gates: tuple[Tensor, ...]
    projected: Tensor | None
    states: tuple[Tensor, ...]


def steps_of(length: int, reverse: bool) -> Sequence[int]:
    """The steps of a loop, in order."""
    return range(length)[::-1] if reverse else range(length)


def run(
    cell: str, gates: Tensor, states: Sequence[Tensor], weights: CellWeights, reverse: bool
) -> LoopResults:
    """Run a cell over time.

    Args:
        cell: the name of the cell.
        gates: the input's share of the gates, `[T, B, gates * H]`, with one step at least.
        states: the first states.
        weights: the weights.
        reverse: whether the last step is the first.
    """
    kind, shares = CELLS[cell], gates.unbind(0)
    hidden: list[Tensor] = [gates] * len(shares)
    kept: list[tuple[Tensor, ...]] = [()] * len(shares)
    state = tuple(states)
    for step in steps_of(len(shares), reverse):
        state, kept[step] = kind.step(shares[step], state, weights)
        hidden[step] = state[0]
    return LoopResults(torch.stack(hidden), state, tuple(map(torch.stack, zip(*kept, strict=True))))


def gradients_of_run(
    cell: str,
    gradients: Sequence[Tensor | None],
    forward: LoopResults,
    states: Sequence[Tensor],
    weights: CellWeights,
    reverse: bool,
) -> LoopGradients:
    """The gradients of `run`.

    Args:
        cell, states, weights, reverse: as those of `run`.
        gradients: those of `forward.hidden` and `forward.last`; None where there is none.
        forward: what the loop has given.
    """
    kind, after = CELLS[cell], forward.hidden.unbind(0)
    kept = [*zip(*(tensor.unbind(0) for tensor in forward.kept), strict=True)] or [()] * len(after)
    of_hidden = gradients[0] if gradients[0] is None else gradients[0].unbind(0)
    order = steps_of(len(after), reverse)
    carried: tuple[Tensor | None, ...] = (gradients[1],)
    others: Sequence[Tensor | None] = gradients[2:]
    gates: list[tuple[Tensor, ...]] = [()] * len(after)
    projected = [*after]
    for step, previous in zip(order[::-1], (*order[-2::-1], None), strict=True):
        gradient = total((None if of_hidden is None else of_hidden[step], *carried))
        if weights.projection is not None:
            projected[step] = torch.zeros_like(after[step]) if gradient is None else gradient
            gradient = projected[step].mm(weights.projection)
        before = (
            states if previous is None else _after(after[previous], kept[previous])[: len(states)]
        )
        parts = kind.gradients((gradient, *others), kept[step], before, after[step], weights)
        gates[step], carried, others = parts.gates, parts.hidden, parts.others
    return LoopGradients(
        tuple(map(torch.stack, zip(*gates, strict=True))),
        None if weights.projection is None else torch.stack(projected),
        tuple(tensor for tensor in (*carried, *others) if tensor is not None),
    )


def _after(hidden: Tensor, kept: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The states after a step: an LSTM keeps its memory last."""
    return (hidden, *kept[-1:])


def total(terms: Iterable[Tensor | None]) -> Tensor | None:
    """The sum of terms in their order; None if there is none."""
    result: Tensor | None = None
    for term in terms:
        if term is not None:
            result = term if result is None else result + term
    return result


def step_products(gradients: Tensor, values: Tensor, first: Tensor | None, reverse: bool) -> Tensor:
    """The gradient of a weight that each step multiplies by: a sum of products, as autograd's.

    Args:
        gradients: the gradients of the products, `[T, B, N]`.
        values: the factors after each step, `[T, B, M]`.
        first: the factor of the first step, `[B, M]`, if each step takes the value after the step
            before it; None if each takes its own.
        reverse: whether the last step is the first.

    Returns:
        The gradient of the weight, `[N, M]`.
    """
    steps = steps_of(len(gradients), not reverse)
    rows, factors = gradients.unbind(0), values.unbind(0)
    before = [factors[step] for step in steps]
    if first is not None:
        before = [*before[1:], first]
    result: Tensor | None = None
    for step, factor in zip(steps, before, strict=True):
        product = rows[step].t().mm(factor)
        result = product if result is None else result.add_(product)
    assert result is not None, "there is a step"
    return result


def step_sums(gradients: Tensor, reverse: bool) -> Tensor:
    """The gradient of a bias that each step adds: `[N]`, of the sums' `[T, B, N]`."""
    rows = gradients.unbind(0)
    result: Tensor | None = None
    for step in steps_of(len(rows), not reverse):
        of_step = rows[step].sum(0)
        result = of_step if result is None else result.add_(of_step)
    assert result is not None, "there is a step"
    return result
