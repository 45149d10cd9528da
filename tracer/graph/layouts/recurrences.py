"""Rules of loops over time: rows may be cut, steps and features may not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...method.recurrence.alignments import CTC_LOSS, CTC_LOSS_BACKWARD
from ...method.recurrence.loop_operators import (
    RECURRENCE,
    RECURRENCE_BACKWARD,
    STEP_PRODUCTS,
    STEP_SUMS,
)
from .cases import Answer, Case, Operand, Rule, Shape, tensors
from .factors import Dim, Dims, Factors, Linear, each, jointly, sizes_of
from .solution import solve

_ROWS: Dim = ("b",)
_WEIGHTS = ("weight", "bias", "projection")


def _dims(name: str, shape: Shape) -> Dims:
    """Dimensions of which the rows are cut alike: those of `[T, B, N]` and `[B, N]`."""
    rows = None if name in _WEIGHTS else len(shape) - 2
    return tuple(_ROWS if dim == rows else (f"{name}{dim}",) for dim in range(len(shape)))


def _operands(case: Case) -> Iterator[tuple[Dims, Shape]]:
    for name, argument in case.arguments.items():
        for index, operand in enumerate(tensors(argument)):
            own = name if name in _WEIGHTS else f"{name}{index}."
            yield _dims(own, operand.shape), operand.shape


def _solved(
    case: Case, shapes: Iterable[tuple[Dims, Shape]], results: tuple[Dims, ...], linear: Linear
) -> Answer:
    """Lay an op out by its rows; `shapes` are those of its operands."""
    operands, known = zip(*shapes, strict=True)
    all_dims = (*operands, *results)
    sizes = sizes_of(all_dims, (*known, *(case.shape(i) for i in range(len(results)))))
    keep = dict.fromkeys(sizes.keys() - {"b"}, "is needed whole in a loop over time")
    return solve(case, Factors(operands, results, sizes, linear, keep))


def _loop(case: Case) -> Answer:
    return _solved(case, _operands(case), _results(case), ())


def _gradients(case: Case) -> Answer:
    """Linear in the gradients together."""
    count = sum(isinstance(gradient, Operand) for gradient in case["gradients"])
    return _solved(case, _operands(case), _results(case), jointly(*range(count)))


def _results(case: Case) -> tuple[Dims, ...]:
    return tuple(_dims(f"result{i}.", case.shape(i)) for i in range(len(case.shapes)))


def _sum_of_steps(case: Case) -> Answer:
    """Gradients of weights: where rows are cut, each rank has a summand."""
    result = _dims("weight", case.shape())
    return _solved(case, _operands(case), (result,), each(0))


_ALIGNED: Mapping[str, Dims] = {
    "log_probs": (("t",), _ROWS, ("c",)),
    "targets": (_ROWS, ("s",)),
    **dict.fromkeys(("gradient", "input_lengths", "target_lengths", "losses"), (_ROWS,)),
    "log_alpha": (_ROWS, ("t",), ("a",)),
}
"""The dimensions of CTC's tensors: rows, steps, classes, labels, and states."""


def _alignment(case: Case) -> Answer:
    return _aligned(case, ("losses", "log_alpha"), ())


def _alignment_backward(case: Case) -> Answer:
    return _aligned(case, ("log_probs",), each(0))


def _aligned(case: Case, results: Sequence[str], linear: Linear) -> Answer:
    operands = (
        (_ALIGNED[name], value.shape)
        for name, value in case.arguments.items()
        if isinstance(value, Operand)
    )
    return _solved(case, operands, tuple(_ALIGNED[name] for name in results), linear)


RULES: Mapping[object, Rule] = {
    CTC_LOSS: _alignment,
    CTC_LOSS_BACKWARD: _alignment_backward,
    RECURRENCE: _loop,
    RECURRENCE_BACKWARD: _gradients,
    STEP_PRODUCTS: _sum_of_steps,
    STEP_SUMS: _sum_of_steps,
}
