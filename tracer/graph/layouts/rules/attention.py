"""Rules of fused attention, forward and backward: batch, heads and the sequence may be cut.

If there are fewer heads of keys than of queries, each head of keys serves a group of query heads,
and the groups may be cut.

Where the sequence is cut, there are two forms. The one with fewer bytes is taken; of equal ones the
second, whose ranks have equal work if attention is causal. A mask that has rows decides for the
first, in which a rank needs its own rows of it:

- by rows: a rank has the rows of its queries, and gathers all keys and values. Its summands of
  their gradients are reduced to pieces.
- by heads: ranks exchange rows for heads, so that each has the whole sequence of some heads
  (https://arxiv.org/abs/2309.14509). The ranks have to divide the heads of keys.

Say p ranks cut a sequence whose queries, keys, values and results have q, k, v and o bytes. Then a
rank receives (k + v)(p - 1)/p in the forward by rows, and (q + k + v + o)(p - 1)/p^2 by heads. The
backward receives the same: it takes keys and values as the forward has left them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .....ir.layout import WHOLE, Cut, volume
from ..asked import ASKED, text_of_cuts
from ..attention_blocks import PADDED, PADDING, backward_of_rows, forward_of_rows
from ..cases import Answer, Case, Expansion, Local, LocalOp, Operand, Rule, Shape, whole
from ..cuts import count, is_interval, spread
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


def _forward(case: Case) -> Answer | Expansion:
    results = (_OUT, _statistics(case, case.shape(1)))
    others = case.shapes[2:]
    rows = partial(_solved, case, results, others, local=forward_of_rows)
    if case.asked is not None:
        return rows(by="heads")
    answer = rows(by="rows")
    if not _has_cut_sequence(case, answer):
        return rows(by="pieces")
    heads = _cut_of_heads(case, answer)
    if heads is None or not _heads_move_less(case):
        _check_padding(case)
        return answer
    layout = answer.results[0]
    assert layout is not None
    return _exchanged(case, heads, [layout.cuts])


def _backward(case: Case) -> Answer | Expansion:
    bias = next((case[name] for name in _BIASES if name in case.arguments), None)
    results: list[Dims] = [_QUERY, _KEY, _VALUE]
    if len(case.shapes) > 3 and isinstance(bias, Operand):
        results.append(_bias(case, bias))
    others = case.shapes[len(results) :]
    solved = partial(_solved, case, tuple(results), others, linear=True, local=backward_of_rows)
    if case.asked is not None:
        return solved(by="rows" if case.asked[_ROWS] else "heads")
    answer = solved(by="rows")
    if not _has_cut_sequence(case, answer):
        return solved(by="pieces")
    heads = None if case["logsumexp"].cuts[_ROWS] else _cut_of_heads(case, answer)
    gradients = []
    for name, layout in zip(("query", "key", "value"), answer.results, strict=False):
        assert layout is not None
        cuts = list(layout.cuts)
        cuts[_ROWS] = case[name].cuts[_ROWS]
        gradients.append(tuple(cuts))
    asked = gradients[0] if heads is None else heads
    return _exchanged(case, asked, gradients)


_ROWS = 2
"""The dimension of rows in queries, keys and values."""


def _has_cut_sequence(case: Case, rows: Answer) -> bool:
    """True if rows of queries are cut, and those of keys and values are not cut otherwise.

    Args:
        case: the op.
        rows: its layout by rows, which other operands may have contradicted.
    """
    cuts: list[Cut] = [case[name].cuts[_ROWS] for name in ("query", "key", "value")]
    query, *others = cuts
    layout = rows.results[0]
    assert layout is not None
    is_kept = bool(query) and layout.cuts[_ROWS] == query
    return is_kept and all(cut in (query, WHOLE) for cut in others)


def _check_padding(case: Case) -> None:
    """Refuse statistics whose rows are not those of queries, since the kernel pads them.

    Raises:
        LayoutError: they are.
    """
    rows = case["query"].shape[_ROWS]
    if case.target in PADDED and rows % PADDING:
        raise case.error(
            f"{rows} rows are cut, and the kernel pads their statistics to a multiple of {PADDING}",
            f"pad sequences to a multiple of {PADDING} tokens, or leave them whole",
        )


def _cut_of_heads(case: Case, rows: Answer) -> tuple[Cut, ...] | None:
    """The cuts of the first result if axes that cut rows cut heads; None if they cannot."""
    layout, query = rows.results[0], case["query"]
    assert layout is not None
    groups = case["key"].shape[1]
    factors = spread(layout.cuts[1], (groups, query.shape[1] // max(groups, 1)), case.sizes)
    rows_cut = query.cuts[_ROWS]
    if factors is None or factors[1] or not (is_interval(rows_cut) and is_interval(factors[0])):
        return None
    if not all(case[name].cuts[_ROWS] for name in ("key", "value")):
        return None
    heads = Cut((*factors[0].axes, *rows_cut.axes))
    if not groups or groups % count(heads, case.sizes) or _has_large_mask(case):
        return None
    return (layout.cuts[0], heads, WHOLE, WHOLE)


def _has_large_mask(case: Case) -> bool:
    """True if a mask has rows, and the same for all heads: by heads, ranks would have all of it."""
    return any(
        len(bias.shape) > 1 and bias.shape[-2] > 1 and (len(bias.shape) < 3 or bias.shape[-3] == 1)
        for bias in (case.arguments.get(name) for name in _BIASES)
        if isinstance(bias, Operand)
    )


def _heads_move_less(case: Case) -> bool:
    """True if rows exchanged for heads are at most as many bytes as gathered keys and values."""
    operands: list[Operand] = [case[name] for name in ("query", "key", "value")]
    query, *others = operands
    keys = sum(math.prod(operand.shape) for operand in others)
    exchanged = keys + math.prod(query.shape) + math.prod(case.shape())
    return exchanged <= keys * count(query.cuts[_ROWS], case.sizes)


def _exchanged(case: Case, asked: tuple[Cut, ...], cuts: Sequence[tuple[Cut, ...]]) -> Expansion:
    """The op in an asked form, whose first results are then brought to these cuts."""
    texts = [text_of_cuts([*enumerate(of_result)]) for of_result in cuts]

    def function(**arguments: Any) -> Any:
        results = case.target(**arguments)
        pairs = zip(results, [*texts, *[None] * (len(results) - len(texts))], strict=True)
        return tuple(
            result if text is None or result is None else ASKED(result, text)
            for result, text in pairs
        )

    return Expansion(function, {case.target: asked})


def _solved(
    case: Case,
    results: tuple[Dims, ...],
    others: tuple[Shape | None, ...],
    linear: bool = False,
    *,
    by: str,
    local: Local,
) -> Answer:
    """Lay attention out.

    Args:
        case: the op.
        results: the dimensions of its first results.
        others: the shapes of its other results, which are equal on all ranks, or not used.
        linear: whether the op is linear in its first operand, the gradient.
        by: "pieces" of batch and heads, "rows" or "heads" of a cut sequence.
        local: what a rank runs by rows.
    """
    sizes = _sizes(case)
    names: dict[str, int] = {}
    operands = tuple(_operands(case, names))
    dropped = float(case["dropout_p"] or 0.0) > 0
    keep = dict.fromkeys(("s", "t", "e", "f", *names), "is needed whole in attention")
    if dropped:
        for factor in ("b", "g", "r"):
            keep[factor] = "has dropout, whose numbers a piece could not draw"
    elif by == "rows":
        del keep["s"]
    present = tuple(None if case.shapes[i] is None else dims for i, dims in enumerate(results))
    sizes |= names | {f"l{i}": 1 for i in range(4)}
    factors = Factors(operands, present, sizes, each(0) if linear else (), keep)
    free = {1: "g"} if by == "heads" else None
    answer = solve(case, factors, local=partial(_local, local if by == "rows" else None), free=free)
    unrelated = tuple(None if shape is None else whole(len(shape)) for shape in others)
    answer = replace(answer, results=(*answer.results, *unrelated), free=frozenset())
    if by == "pieces" or dropped:
        return answer
    return replace(answer, dispatched=dict.fromkeys(_exchangeable(case, answer, by)))


def _exchangeable(case: Case, answer: Answer, by: str) -> Iterator[int]:
    """The operands that may be exchanged, since the plan has cut the sequence.

    Of a mask that has rows, nothing is: it is large, and each rank can make its rows of it.
    """
    biases = [case.arguments.get(name) for name in _BIASES]
    keys = (case["key"], case["value"])
    for index, operand in enumerate(case.operands):
        is_bias = any(operand is bias for bias in biases)
        has_rows = len(operand.shape) > 1 and operand.shape[-2] > 1
        if not has_rows if is_bias else by == "heads" or any(operand is key for key in keys):
            yield index


def _local(rows: Local | None, op: LocalOp) -> Any:
    """Run the op. For an empty piece give zeros, since kernels divide by the number of heads."""
    if not volume(op.operands[0]):
        return zeros(op, op.arguments["query"])
    return op.run() if rows is None else rows(op)


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
            yield _statistics(case, value.shape)
        elif name in _BIASES:
            yield _bias(case, value)
        else:
            own = {f"{name}{i}": size for i, size in enumerate(value.shape)}
            names.update(own)
            yield tuple((factor,) for factor in own)


def _statistics(case: Case, shape: Shape) -> Dims:
    """The dimensions of the statistics of rows, whose number some kernels pad."""
    more: list[Dim] = [(f"l{i}",) for i in range(len(shape) - 2)]
    if more and shape[_ROWS] == case["query"].shape[_ROWS]:
        more[0] = ("s",)
    return (("b",), _HEADS, *more)


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
