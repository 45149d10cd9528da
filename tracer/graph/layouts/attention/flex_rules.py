"""Rules of attention with a function of scores: batch, heads and rows of queries may be cut.

A rank's functions get the indices of the whole, so they compute what they would in one process. A
dimension of a captured tensor is cut with the batch, the heads or the queries, if the index of
these alone indexes it. Where the sequence is cut, a rank has the rows of its queries, and gathers
all keys and values. Its summands of their gradients are reduced to pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .....ir.layout import Intervals, Region, shape_of, volume
from ....method.attention.flex_operators import (
    FLEX_ATTENTION,
    FLEX_ATTENTION_BACKWARD,
    ONE_BLOCK,
    FlexForm,
)
from ..asked import ASKED, text_of_cuts
from ..cases import Answer, Case, Expansion, LocalOp, Operand, Rule, Shape, tensors
from ..factors import Dim, Dims, Factors, Linear, jointly
from ..solution import solve

_HEADS: Dim = ("g", "r")
_INDEXED: tuple[Dim, ...] = (("b",), _HEADS, ("s",))
"""The dimensions of the batch, the heads and the queries, by the numbers of their indices."""

_QUERY: Dims = (("b",), _HEADS, ("s",), ("e",))
_KEY: Dims = (("b",), ("g",), ("t",), ("e",))
_VALUE: Dims = (("b",), ("g",), ("t",), ("f",))
_OUT: Dims = (("b",), _HEADS, ("s",), ("f",))
_STATISTICS: Dims = (("b",), _HEADS, ("s",))
_ROLES: Mapping[str, Dims] = {
    "query": _QUERY,
    "key": _KEY,
    "value": _VALUE,
    "out": _OUT,
    "grad_out": _OUT,
    "logsumexp": _STATISTICS,
    "grad_logsumexp": _STATISTICS,
}
_CAPTURED = ("captured", "mask_captured")
_ROWS = 2


def _forward(case: Case) -> Answer:
    return _solved(case, (_OUT, _STATISTICS, _STATISTICS), ())


def _backward(case: Case) -> Answer | Expansion:
    of_captured = [dims for dims, _ in _captured_dims(case, "captured")]
    pairs = zip(of_captured, case["needs"], strict=True)
    gradients = [dims for dims, is_needed in pairs if is_needed]
    cotangents = [case[name] for name in ("grad_out", "grad_logsumexp")]
    count = sum(isinstance(cotangent, Operand) for cotangent in cotangents)
    results = (_QUERY, _KEY, _VALUE, *gradients)
    answer = _solved(case, results, jointly(*range(count)))
    if case.asked is not None or not _has_cut_rows(case):
        return answer
    return _reduced(case, answer)


def _reduced(case: Case, answer: Answer) -> Expansion:
    """The op, whose summands of the gradients of keys and values are reduced to pieces."""
    layouts = [layout for layout in answer.results if layout is not None]
    texts = []
    for name, layout in zip(("key", "value"), layouts[1:3], strict=True):
        cuts = list(layout.cuts)
        cuts[_ROWS] = case[name].cuts[_ROWS]
        texts.append(text_of_cuts([*enumerate(cuts)]))

    def function(**arguments: Any) -> Any:
        query, *own = case.target(**arguments)
        reduced = [ASKED(gradient, text) for gradient, text in zip(own, texts, strict=False)]
        return (query, *reduced, *own[len(texts) :])

    return Expansion(function, {case.target: layouts[0].cuts})


def _solved(case: Case, results: tuple[Dims, ...], linear: Linear) -> Answer:
    """Lay attention out.

    Raises:
        LayoutError: the plan asks for another form than a gather.
    """
    operands = tuple(_operands(case))
    sizes = factor_sizes(case)
    for dims, shape in operands:
        sizes |= {dim[0]: n for dim, n in zip(dims, shape, strict=True) if len(dim) == 1}
    keep = dict.fromkeys(sizes.keys() - {"b", "g", "r"}, "is needed whole in flex_attention")
    has_rows = _has_cut_rows(case)
    if has_rows:
        _check_rows(case)
        del keep["s"]
    factors = Factors(tuple(dims for dims, _ in operands), results, sizes, linear, keep)
    answer = replace(solve(case, factors, local=_local), free=frozenset())
    if not has_rows:
        return answer
    exchanged = dict.fromkeys(_exchangeable(case))
    return replace(answer, dispatched={**answer.dispatched, **exchanged})


def _has_cut_rows(case: Case) -> bool:
    """True if rows of queries are cut, and those of keys and values are not cut otherwise."""
    query, key, value = (case[name].cuts[_ROWS] for name in ("query", "key", "value"))
    return bool(query) and all(not cut or cut == query for cut in (key, value))


def _check_rows(case: Case) -> None:
    if case.attention not in (None, "gather"):
        raise case.error(
            f"the plan asks for attention by {case.attention}, and flex_attention gathers keys and "
            "values",
            "leave out attention= in the plan, or ask for attention='gather'",
        )
    form = FlexForm.read(case["form"])
    if case["blocks"] and form.masks_nothing:
        raise case.error(
            "rows are cut, and its BlockMask has blocks, but a mask_mod that hides nothing",
            "give BlockMask.from_kv_blocks a mask_mod that says what the blocks say, or leave "
            "block_mask out",
        )


def _exchangeable(case: Case) -> Iterator[int]:
    """Keys, values and captured tensors, which a rank with some rows needs whole."""
    names = ("key", "value", *_CAPTURED)
    wanted = {id(operand) for name in names for operand in tensors(case[name])}
    for index, operand in enumerate(case.operands):
        if id(operand) in wanted:
            yield index


def factor_sizes(case: Case) -> dict[str, int]:
    """The sizes of the factors of queries, keys and values."""
    (batch, heads, rows, entries), keys, values = (case[n].shape for n in ("query", "key", "value"))
    groups = keys[1]
    sizes = {"b": batch, "g": groups, "r": heads // max(groups, 1), "s": rows, "e": entries}
    return sizes | {"t": keys[_ROWS], "f": values[3]}


def _operands(case: Case) -> Iterator[tuple[Dims, Shape]]:
    """The dimensions and the shape of each operand."""
    for name, value in case.arguments.items():
        if name in _CAPTURED:
            yield from _captured_dims(case, name)
        elif name == "blocks":
            for index, operand in enumerate(tensors(value)):
                yield _dims_of_blocks(case, f"{name}{index}", operand.shape), operand.shape
        elif isinstance(value, Operand):
            yield _ROLES[name], value.shape


def _captured_dims(case: Case, name: str) -> Iterator[tuple[Dims, Shape]]:
    form = FlexForm.read(case["form"])
    aligned = form.aligned if name == "captured" else form.mask_aligned
    for index, (operand, which) in enumerate(zip(case[name], aligned, strict=True)):
        own = [f"{name}{index}.{dim}" for dim in range(len(operand.shape))]
        dims = tuple(
            (factor,) if number is None else _INDEXED[number]
            for factor, number in zip(own, which, strict=True)
        )
        yield dims, operand.shape


def _dims_of_blocks(case: Case, name: str, shape: Shape) -> Dims:
    """The dimensions of a tensor of blocks, which begin with the batch and the heads, or 1."""
    lengths = case["query"].shape[:2]
    first = [
        dim if size == length and size > 1 else (f"{name}.{index}",)
        for index, (dim, size, length) in enumerate(zip(_INDEXED, shape, lengths, strict=False))
    ]
    return (*first, *((f"{name}.{index}",) for index in range(len(first), len(shape))))


def _local(op: LocalOp) -> Any:
    """Run the op with the indices of the rank; for an empty piece give zeros."""
    query, key = (_region_of(op, name) for name in ("query", "key"))
    if not volume(query):
        return _zeros(op)
    regions = (query[0], query[1], query[_ROWS], key[_ROWS])
    names = ("batch", "heads", "rows", "columns")
    changed: dict[str, Any] = dict(zip(names, map(_bounds, regions), strict=True))
    if op.arguments["blocks"] and changed["rows"] != [0, op.shapes[0][_ROWS]]:  # type: ignore[index]
        form = FlexForm.read(op.arguments["form"])
        changed["form"] = replace(form, lengths=(1, 1), block=ONE_BLOCK).text
        changed["blocks"] = []
    return op.run(**changed)


def _bounds(intervals: Intervals) -> list[int]:
    return [bound for interval in intervals for bound in interval]


def _zeros(op: LocalOp) -> tuple[fx.Node, ...]:
    query = op.arguments["query"]
    results = []
    for region, fake in zip(op.results, op.fakes, strict=True):
        assert region is not None
        sizes = [*shape_of(region)]
        results.append(
            op.emit(torch.ops.aten.new_full.default, query, sizes, 0.0, dtype=fake.dtype)
        )
    return tuple(results)


def _region_of(op: LocalOp, name: str) -> Region:
    """The region of an operand that the rank holds; only tensors stand before it."""
    before: Sequence[str] = list(op.arguments)[: list(op.arguments).index(name)]
    return op.operands[sum(isinstance(op.arguments[other], fx.Node) for other in before)]


RULES: Mapping[object, Rule] = {
    FLEX_ATTENTION: _forward,
    FLEX_ATTENTION_BACKWARD: _backward,
}
