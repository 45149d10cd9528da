"""The bindings that bodies call do what the operators do that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from cg.tracer.graph.codegen.direct_calls import BINDINGS, call_of
from cg.tracer.graph.layouts.asked import ASKED
from cg.tracer.method.experts import rows_by_expert as rows
from cg.tracer.method.experts.expert_products import GROUPED_MM, GROUPED_MM_OUT

_ATEN = torch.ops.aten
X, INTS = torch.randn(3, 4), torch.arange(12).view(3, 4)
ZERO, COMPLEX = torch.tensor(2), torch.randn(3, 4, dtype=torch.complex64)
HALF = torch.randn(3, 4).bfloat16()

ORDER, ENDS = torch.tensor([3, 1, 0]), torch.tensor([1, 3], dtype=torch.int32)
MATRICES = torch.randn(2, 4, 5)

PAIRS: list[tuple[Any, ...]] = [
    *((a, b) for a in (X, INTS, ZERO, HALF) for b in (X, INTS, ZERO, HALF, 2, 2.5, True)),
    (X, 1j),
    (COMPLEX, X),
    (X, X[:1]),
    (X[:0], 1.0),
]

CALLS: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    _ATEN.add.Tensor: [*((p, {}) for p in PAIRS), ((X, X), {"alpha": 2}), ((X, 1), {"alpha": 0.5})],
    _ATEN.sub.Tensor: [*((p, {}) for p in PAIRS if p[1] is not True), ((X, X), {"alpha": 2})],
    _ATEN.mul.Tensor: [(p, {}) for p in PAIRS],
    _ATEN.div.Tensor: [(p, {}) for p in PAIRS],
    _ATEN.mm.default: [((X, X.t()), {}), ((X[:0], X.t()), {}), ((HALF, HALF.t()), {})],
    _ATEN.addcmul.default: [((X, X, X), {}), ((X[0], X, X[:, :1]), {"value": 0.5})],
    _ATEN.cat.default: [(([X, X],), {}), (([X, X[:0]], 0), {}), (([X, HALF], -1), {})],
    _ATEN.index_select.default: [
        ((X, 0, torch.tensor([2, 0])), {}),
        ((X, -1, torch.tensor(1)), {}),
    ],
    _ATEN.view.default: [((X, [2, -1]), {}), ((X[0, 0], []), {}), ((X[:0], [0, 7]), {})],
    _ATEN.transpose.int: [((X, 0, -1), {}), ((ZERO, 0, -1), {})],
    _ATEN.permute.default: [((X, [1, 0]), {}), ((X, [-1, 0]), {}), ((ZERO, []), {})],
    _ATEN.unsqueeze.default: [((X, -1), {}), ((ZERO, 0), {})],
    _ATEN.select.int: [((X, 0, 1), {}), ((X, -1, -2), {})],
    _ATEN.mul.out: [((X, X), {"out": torch.empty(3, 4)}), ((X, X[:1]), {"out": X.new_empty(3, 4)})],
    ASKED: [((X, ""), {}), ((X.t(), "0:tp:1"), {})],
    GROUPED_MM: [
        ((X, MATRICES, ENDS), {}),
        ((MATRICES.transpose(1, 2), X.t(), ENDS), {}),
        ((X.t(), X, ENDS), {}),
    ],
    GROUPED_MM_OUT: [
        ((X, MATRICES, ENDS), {"out": torch.empty(3, 5)}),
        ((MATRICES.transpose(1, 2), X.t(), ENDS), {"out": torch.empty(5, 3)}),
        ((X.t(), X, ENDS), {"out": torch.empty(2, 4, 4)}),
    ],
    rows.OWN_ROWS: [((INTS, 2, 5), {}), ((INTS, 2, 5, 12, [0, 0]), {"all_rows": True})],
    rows.FIRST_ROWS: [((X, ORDER[:2]), {})],
    rows.WITH_ROOM: [((X, ORDER, 3), {})],
    rows.ROWS_BACK: [((X, ORDER, ENDS, 5), {}), ((X[:, :1], ORDER, ENDS, 4), {})],
    rows.SUMS_BY_TOKEN: [((X, ORDER // 2, ENDS, 2), {}), ((HALF, ORDER // 2, ENDS, 3), {})],
}


def test_all_are_compared() -> None:
    assert CALLS.keys() == BINDINGS.keys()


@pytest.mark.parametrize("op", CALLS, ids=str)
def test_they_are_the_operators(op: Any) -> None:
    function = call_of(op)
    assert function is BINDINGS[op]
    for args, kwargs in CALLS[op]:
        results = tree_leaves(function(*args, **kwargs)), tree_leaves(op(*args, **kwargs))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            assert found.stride() == expected.stride()
            shares = [
                each.untyped_storage()._cdata == args[0].untyped_storage()._cdata
                for each in (found, expected)
                if isinstance(args[0], torch.Tensor)
            ]
            assert len(set(shares)) <= 1


def test_what_has_no_binding() -> None:
    assert call_of(_ATEN.view.dtype) is _ATEN.view.dtype._op
    assert call_of(len) is len
