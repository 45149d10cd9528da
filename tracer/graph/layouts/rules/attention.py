"""Rules of fused attention, forward and backward: batch and heads may be cut.

If there are fewer heads of keys than of queries, each head of keys serves a group of query heads,
and the groups may be cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from .....ir.layout import volume
from ..cases import Answer, Case, LocalOp, Operand, Rule, Shape, whole
from ..factors import Dim, Dims, Factors, each
from ..solution import solve
from .creation import zeros

_ATEN = torch.ops.aten

_HEADS: Dim = ("g", "r")
_QUERY: Dims = (("b",), _HEADS, ("s",), ("e",))
_KEY: Dims = (("b",), ("g",), ("t",), ("e",))
_VALUE: Dims = (("b",), ("g",), ("t",), ("f",))
_OUT: Dims = (("b",), _HEADS, ("s",), ("f",))
_ROLES: Mapping[str, Dims] = {
    "query": _QUERY,
    "key": _KEY,
    "value": _VALUE,
    "out": _OUT,
    "grad_out": _OUT,
    "grad_out_": _OUT,
}
_BIASES = ("attn_mask", "attn_bias")


def _forward(case: Case) -> Answer:
    return _solved(case, (_OUT, _statistics(case.shape(1))), case.shapes[2:])


def _backward(case: Case) -> Answer:
    bias = next((case[name] for name in _BIASES if name in case.arguments), None)
    results: list[Dims] = [_QUERY, _KEY, _VALUE]
    if len(case.shapes) > 3 and isinstance(bias, Operand):
        results.append(_bias(case, bias))
    return _solved(case, tuple(results), case.shapes[len(results) :], linear=True)


def _solved(
    case: Case,
    results: tuple[Dims, ...],
    others: tuple[Shape | None, ...],
    linear: bool = False,
) -> Answer:
    """Lay attention out.

    Args:
        case: the op.
        results: the dimensions of its first results.
        others: the shapes of its other results, which are equal on all ranks, or not used.
        linear: whether the op is linear in its first operand, the gradient.
    """
    sizes = _sizes(case)
    names: dict[str, int] = {}
    operands = tuple(_operands(case, names))
    dropped = float(case["dropout_p"] or 0.0) > 0
    keep = dict.fromkeys(("s", "t", "e", "f", *names), "is needed whole in attention")
    if dropped:
        for factor in ("b", "g", "r"):
            keep[factor] = "has dropout, whose numbers a piece could not draw"
    present = tuple(None if case.shapes[i] is None else dims for i, dims in enumerate(results))
    sizes |= names | {f"l{i}": 1 for i in range(4)}
    factors = Factors(operands, present, sizes, each(0) if linear else (), keep)
    answer = solve(case, factors, local=_local)
    unrelated = tuple(None if shape is None else whole(len(shape)) for shape in others)
    return replace(answer, results=(*answer.results, *unrelated))


def _local(op: LocalOp) -> Any:
    """Run the op. For an empty piece give zeros, since kernels divide by the number of heads."""
    return op.run() if volume(op.operands[0]) else zeros(op, op.arguments["query"])


def _sizes(case: Case) -> dict[str, int]:
    (batch, heads, rows, entries), keys, values = (case[n].shape for n in ("query", "key", "value"))
    groups = keys[1]
    sizes = {"b": batch, "g": groups, "r": heads // max(groups, 1), "s": rows, "e": entries}
    return sizes | {"t": keys[2], "f": values[3]}


def _operands(case: Case, names: dict[str, int]) -> Iterator[Dims]:
    """The dimensions of each operand; factors that only one operand has are added to `names`."""
    for name, value in case.arguments.items():
        if not isinstance(value, Operand):
            continue
        if name in _ROLES:
            yield _ROLES[name]
        elif name == "logsumexp":
            yield _statistics(value.shape)
        elif name in _BIASES:
            yield _bias(case, value)
        else:
            own = {f"{name}{i}": size for i, size in enumerate(value.shape)}
            names.update(own)
            yield tuple((factor,) for factor in own)


def _statistics(shape: Shape) -> Dims:
    """The dimensions of the statistics of rows, whose number some kernels pad."""
    return (("b",), _HEADS, *((f"l{i}",) for i in range(len(shape) - 2)))


def _bias(case: Case, value: Operand) -> Dims:
    sizes = _sizes(case)
    full = (("b",), _HEADS, ("s",), ("t",))
    lengths = (sizes["b"], sizes["g"] * sizes["r"], sizes["s"], sizes["t"])
    first = 4 - len(value.shape)
    return tuple(
        full[first + i] if size == lengths[first + i] else () for i, size in enumerate(value.shape)
    )


RULES: Mapping[object, Rule] = {
    **dict.fromkeys(
        (
            _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
            _ATEN._scaled_dot_product_flash_attention.default,
            _ATEN._scaled_dot_product_efficient_attention.default,
            _ATEN._scaled_dot_product_cudnn_attention.default,
        ),
        _forward,
    ),
    **dict.fromkeys(
        (
            _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
            _ATEN._scaled_dot_product_flash_attention_backward.default,
            _ATEN._scaled_dot_product_efficient_attention_backward.default,
            _ATEN._scaled_dot_product_cudnn_attention_backward.default,
        ),
        _backward,
    ),
}
