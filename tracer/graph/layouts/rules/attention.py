"""Rules of fused attention, forward and backward: batch, heads and the sequence may be cut.

If there are fewer heads of keys than of queries, each head of keys serves a group of query heads,
and the groups may be cut.

Where the sequence is cut, there are three forms:

- gather: a rank has the rows of its queries, and gathers all keys and values. Its summands of
  their gradients are reduced to pieces.
- heads: ranks exchange rows for heads, so that each has the whole sequence of some heads
  (https://arxiv.org/abs/2309.14509). The ranks have to divide the heads of keys.
- ring: a rank has the rows of its queries; blocks of keys and values come by (`attention_ring`).

Of those that can be, the plan's is taken, or the one that `attention_forms` chooses. A mask that
has rows decides against heads, where a rank would need all of it, and not its own rows.

Say p ranks cut a sequence whose queries, keys, values and results have q, k, v and o bytes. Then a
rank receives (k + v)(p - 1)/p in the forward by gather or ring, and (q + k + v + o)(p - 1)/p^2 by
heads. The backward of gather and heads receives the same: it takes keys and values as the forward
has left them. That of the ring receives keys, values and their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .....ir.layout import WHOLE, Cut, Layout, volume
from ..asked import ASKED, text_of_cuts
from ..attention.attention_blocks import PADDED, PADDING, at_once, backward_of_rows, forward_of_rows
from ..attention.attention_forms import Sizes, best
from ..attention.attention_ring import (
    ADD,
    BACKWARDS,
    FORWARDS,
    KERNELS,
    StepOp,
    backward_of_ring,
    forward_of_ring,
)
from ..attention.flex_rules import factor_sizes
from ..cases import Answer, Case, Expansion, Local, LocalOp, Operand, Rule, Shape, whole
from ..cuts import CutProduct, count, is_interval, spread
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
    form, why = _form(case, heads)
    if form == "heads":
        assert not isinstance(heads, str)
        layout = answer.results[0]
        assert layout is not None
        return _exchanged(case, heads, [layout.cuts], why)
    _check_padding(case)
    if form == "ring":
        return Expansion(forward_of_ring(case.target, _ranks(case), case.shape(1)), why=why)
    return replace(answer, why=why)


def _backward(case: Case) -> Answer | Expansion:
    bias = _bias_of(case)
    results: list[Dims] = [_QUERY, _KEY, _VALUE]
    if len(case.shapes) > 3 and bias is not None:
        results.append(_bias(case, bias))
    others = case.shapes[len(results) :]
    solved = partial(_solved, case, tuple(results), others, linear=True, local=backward_of_rows)
    if case.asked is not None:
        return solved(by="rows" if case.asked[_ROWS] else "heads")
    answer = solved(by="rows")
    if not _has_cut_sequence(case, answer):
        return solved(by="pieces")
    by_heads = not case["logsumexp"].cuts[_ROWS]  # so the forward has left them
    heads = _cut_of_heads(case, answer) if by_heads else "the forward was by rows"
    form, why = _form(case, heads)
    if form == "ring":
        return Expansion(backward_of_ring(case.target, _ranks(case)), why=why)
    gradients = []
    for name, layout in zip(("query", "key", "value"), answer.results, strict=False):
        assert layout is not None
        cuts = list(layout.cuts)
        cuts[_ROWS] = case[name].cuts[_ROWS]
        gradients.append(tuple(cuts))
    asked = gradients[0] if isinstance(heads, str) else heads
    return _exchanged(case, asked, gradients, why)


def _step(case: Case) -> Answer:
    """A step of a ring: keys and values are those of the ranks so many positions ahead."""
    kernel = KERNELS[case.target]
    behind, step = case["behind"], case["step"]
    names = {argument.name for argument in kernel._schema.arguments}
    plain = replace(
        case,
        target=kernel,
        arguments={name: value for name, value in case.arguments.items() if name in names},
        operands=tuple(operand for operand in case.operands if operand is not behind),
    )
    is_forward = kernel in FORWARDS
    results: tuple[Dims, ...] = (_QUERY, _KEY, _VALUE)
    if is_forward:
        results = (_OUT, _statistics(plain, case.shape(1)))
    others = case.shapes[len(results) :]
    local = partial(_local_step, is_forward)
    answer = _solved(plain, results, others, not is_forward, by="rows")
    cut = case["query"].cuts[_ROWS]
    wanted, layouts = list(answer.wanted), list(answer.results)
    moved = {i for i, o in enumerate(plain.operands) if o is plain["key"] or o is plain["value"]}
    for index in moved:
        wanted[index] = _of_step(wanted[index], cut, step)
    for index in () if is_forward else (1, 2):
        layout = layouts[index]
        assert layout is not None
        layouts[index] = _of_step(layout, cut, step)
    if isinstance(behind, Operand):
        wanted.append(behind.layout)
    reasons = {index: why for index, why in answer.reasons.items() if index not in moved}
    return replace(
        answer,
        wanted=tuple(wanted),
        results=tuple(layouts),
        local=local,
        reasons=reasons,
        is_late=True,
    )


def _of_step(layout: Layout, cut: Cut, step: int) -> Layout:
    """A layout of keys, as ranks have them in a step of a ring."""
    cuts = list(layout.cuts)
    cuts[_ROWS] = replace(cut, shift=step)
    summands = [axis for axis in layout.summands if axis not in cut.axes]
    return Layout(tuple(cuts), layout.summands, layout.reduce).keeping(summands)


def _local_step(is_forward: bool, op: LocalOp) -> Any:
    if not volume(op.operands[0]):
        return zeros(op, op.arguments["query"])
    kernel = StepOp(op)
    return forward_of_rows(kernel, is_part=True) if is_forward else backward_of_rows(kernel)


def _add(case: Case) -> Answer:
    """A gradient that travels is taken where the own one is, behind the step that has made this."""
    moving, own = case["moving"], case["own"]
    layout = replace(own.layout, summands=moving.layout.summands, reduce=moving.layout.reduce)
    if layout != own.layout:
        layout = Layout(own.cuts)
    index = case.operands.index(moving)
    return Answer(
        (layout, layout), (layout,), local=_local_add, dispatched={index: None}, is_late=True
    )


def _local_add(op: LocalOp) -> Any:
    return op.emit(_ATEN.add.Tensor, op.arguments["moving"], op.arguments["own"])


def _form(case: Case, heads: tuple[Cut, ...] | str) -> tuple[str, str]:
    """The form of attention over a cut sequence, and why it is taken.

    Args:
        case: the op.
        heads: the cuts by heads, or the reason why there are none.

    Raises:
        LayoutError: the plan asks for a form that cannot be.
    """
    refused = {"heads": heads} if isinstance(heads, str) else {}
    if (reason := _no_ring(case)) is not None:
        refused["ring"] = reason
    asked = case.attention
    if asked in refused and case.target in FORWARDS:
        raise case.error(
            f"the plan asks for attention by {asked}, and {refused[asked]}",
            "leave out attention= in the plan, and the best form that can be is taken",
        )
    if asked is not None and asked not in refused:
        return asked, f"{asked}: asked for by the plan"
    if asked is not None:  # the backward of a forward that has left its results otherwise
        refused |= dict.fromkeys(("heads", "ring"), "the plan asks for another")
    return best(_sizes_of_rank(case), refused)


def _no_ring(case: Case) -> str | None:
    """The reason why attention cannot be a ring; None if it can."""
    operands = [case[name] for name in ("query", "key", "value")]
    cuts = [operand.cuts[_ROWS] for operand in operands]
    if len(set(cuts)) > 1 or len({operand.shape[_ROWS] for operand in operands}) > 1:
        return "queries and keys are not cut alike"
    if cuts[0].blocks > 1 or isinstance(cuts[0], CutProduct):
        return "rows are packed"
    bias = _bias_of(case)
    if bias is not None and case.target in BACKWARDS and len(case.shapes) > 3:
        wants = case.arguments.get("grad_input_mask")
        if wants is None or wants[3]:
            return "the mask has a gradient, which each step would give a part of"
    return None


def _bias_of(case: Case) -> Operand | None:
    biases = (case.arguments.get(name) for name in _BIASES)
    return next((bias for bias in biases if isinstance(bias, Operand)), None)


def _ranks(case: Case) -> int:
    """The number of pieces of the sequence."""
    cut: Cut = case["query"].cuts[_ROWS]
    return count(cut, case.sizes)


def _sizes_of_rank(case: Case) -> Sizes:
    """The sizes of a rank's pieces; other axes cut batch and heads as they do the queries."""
    query, key, value = operands = [case[name] for name in ("query", "key", "value")]
    pieces = [math.prod(count(cut, case.sizes) for cut in operand.cuts) for operand in operands]
    q, k, v = (
        math.prod(operand.shape) * operand.dtype.itemsize // number
        for operand, number in zip(operands, pieces, strict=True)
    )
    batch, heads, rows, entries = query.shape
    pairs = batch * heads * rows * key.shape[_ROWS] // pieces[0]
    products = 2 * pairs * (entries + value.shape[3]) // (2 if case["is_causal"] else 1)
    return Sizes(_ranks(case), q, k, v, q * value.shape[3] // max(entries, 1), products)


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


def _cut_of_heads(case: Case, rows: Answer) -> tuple[Cut, ...] | str:
    """The cuts of the first result if axes that cut rows cut heads; or why they cannot."""
    layout, query = rows.results[0], case["query"]
    assert layout is not None
    groups = case["key"].shape[1]
    factors = spread(layout.cuts[1], (groups, query.shape[1] // max(groups, 1)), case.sizes)
    rows_cut = query.cuts[_ROWS]
    has_runs = rows_cut.blocks == 1 and not isinstance(rows_cut, CutProduct)
    if factors is None or factors[1] or not (has_runs and is_interval(factors[0])):
        return "rows or heads are packed"
    if not all(case[name].cuts[_ROWS] for name in ("key", "value")):
        return "keys are whole"
    heads = Cut((*factors[0].axes, *rows_cut.axes))
    ranks = count(heads, case.sizes)
    if not groups or groups % ranks:
        return f"{groups} heads of keys are not {ranks} equal parts"
    if _has_large_mask(case):
        return "the mask has rows, of which each rank would need all"
    return (layout.cuts[0], heads, WHOLE, WHOLE)


def _has_large_mask(case: Case) -> bool:
    """True if a mask has rows, and the same for all heads: by heads, ranks would have all of it."""
    bias = _bias_of(case)
    if bias is None or len(bias.shape) < 2 or bias.shape[-2] == 1:
        return False
    return len(bias.shape) < 3 or bias.shape[-3] == 1


def _exchanged(
    case: Case, asked: tuple[Cut, ...], cuts: Sequence[tuple[Cut, ...]], why: str
) -> Expansion:
    """The op in an asked form, whose first results are then brought to these cuts."""
    texts = [text_of_cuts([*enumerate(of_result)]) for of_result in cuts]

    def function(**arguments: Any) -> Any:
        results = case.target(**arguments)
        pairs = zip(results, [*texts, *[None] * (len(results) - len(texts))], strict=True)
        return tuple(
            result if text is None or result is None else ASKED(result, text)
            for result, text in pairs
        )

    return Expansion(function, {case.target: asked}, why)


def _solved(
    case: Case,
    results: tuple[Dims, ...],
    others: tuple[Shape | None, ...],
    linear: bool = False,
    *,
    by: str,
    local: Local = at_once,
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
    sizes = factor_sizes(case)
    names: dict[str, int] = {}
    operands = tuple(_operands(case, names))
    dropped = float(case["dropout_p"] or 0.0) > 0 and "columns" not in case.arguments
    keep = dict.fromkeys(("s", "t", "e", "f", *names), "is needed whole in attention")
    if dropped:
        keep |= dict.fromkeys("bgr", "has dropout, whose numbers a piece could not draw")
    elif by == "rows":
        del keep["s"]
    present = tuple(None if case.shapes[i] is None else dims for i, dims in enumerate(results))
    sizes |= names | {f"l{i}": 1 for i in range(4)}
    factors = Factors(operands, present, sizes, each(0) if linear else (), keep)
    free = {1: "g"} if by == "heads" else None
    answer = solve(
        case, factors, local=partial(_local, local if by == "rows" else at_once), free=free
    )
    unrelated = tuple(None if shape is None else whole(len(shape)) for shape in others)
    answer = replace(answer, results=(*answer.results, *unrelated), free=frozenset())
    if by == "pieces" or dropped:
        return answer
    return replace(answer, dispatched=dict.fromkeys(_exchangeable(case, answer, by)))


def _exchangeable(case: Case, answer: Answer, by: str) -> Iterator[int]:
    """The operands that may be exchanged, since the plan has cut the sequence.

    Of a mask that has rows, nothing is: it is large, and each rank can make its rows of it.
    """
    bias, keys = _bias_of(case), (case["key"], case["value"])
    for index, operand in enumerate(case.operands):
        has_rows = len(operand.shape) > 1 and operand.shape[-2] > 1
        if (
            not has_rows
            if operand is bias
            else by == "heads" or any(operand is key for key in keys)
        ):
            yield index


def _local(run: Local, op: LocalOp) -> Any:
    """Run the op. For an empty piece give zeros, since kernels divide by the number of heads."""
    if not volume(op.operands[0]):
        return zeros(op, op.arguments["query"])
    return run(op)


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
    sizes = factor_sizes(case)
    full = (("b",), _HEADS, ("s",), ("t",))
    lengths = (sizes["b"], sizes["g"] * sizes["r"], sizes["s"], sizes["t"])
    first = 4 - len(value.shape)
    return tuple(
        full[first + i] if size == lengths[first + i] else () for i, size in enumerate(value.shape)
    )


RULES: Mapping[object, Rule] = {
    **dict.fromkeys(FORWARDS, _forward),
    **dict.fromkeys(BACKWARDS, _backward),
    **dict.fromkeys(KERNELS, _step),
    ADD: _add,
}
