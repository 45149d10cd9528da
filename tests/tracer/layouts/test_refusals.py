"""Errors of values that cannot be laid out say where, why, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cg.ir.layout import Cut, Layout
from cg.tracer.graph.layouts.cases import LayoutError
from cg.tracer.graph.layouts.change import DEFAULT
from cg.tracer.graph.layouts.propagation.propagate import propagate

from .op_cases import ints
from .simulation import check, layout, mesh, trace

GRID = mesh(dp=2, tp=2)
X = ints(4, 6)

CASES: dict[str, tuple[Callable[..., Any], list[str], str]] = {
    "no rule": (torch.geqrf, ["dp,-"], r"aten.geqrf has no rule"),
    "whole matrices": (torch.linalg.inv, ["dp,-"], r"dimension 0 of %arg0_1 is of whole matrices"),
    "a write to one row": (
        lambda x: x[1].add_(x[2]),
        ["dp,-"],
        r"dimension 0 of %x_1 has one index selected",
    ),
    "strides": (
        lambda x: x.as_strided((3, 6), (3, 1)),
        ["dp,-"],
        r"aten.as_strided: it takes strides \[3, 1\] of memory, of which ranks hold pieces",
    ),
    "windows": (lambda x: x.unfold(1, 2, 2), ["-,tp"], r"has windows taken along it"),
    "a gather": (
        lambda x: x.sort(1)[0],
        ["-,tp"],
        r"aten.sort needs %x_1 f64\[4,6\], but it is %x_1 f64\[4,6/tp\], and would have to be "
        r"gathered: dimension 1 of %x_1 is needed whole",
    ),
    "contradicting cuts": (
        lambda x, y: x + y,
        ["dp,-", "tp,-"],
        r"needs %y_1 f64\[4/dp,6\], but it is %y_1 f64\[4/tp,6\], and would have to be moved "
        r"between ranks: dimension 0 of %y_1 is cut along tp, but along dp in %x_1",
    ),
    "one axis for two dimensions": (
        lambda x, y: x @ y.t(),
        ["tp,-", "tp,-"],
        r"axis tp cuts dimension 1 of %t, and another dimension of %x_1",
    ),
    "a view": (
        lambda x: x.view(4, 3, 2),
        ["-,tp"],
        r"dimension 1 of %x_1 is 6 cut along tp, whose pieces are not those of 3 x 2",
    ),
    "a slice": (lambda x: x[:, 1:3], ["-,tp"], r"dimension 1 of %x_1 is sliced to 2 of 6"),
    "a write": (
        lambda x: x.view(-1).add_(1),
        ["-,-|tp"],
        r"writes in place to %view, which is not laid out as the op needs it",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refusals(name: str) -> None:
    function, given, message = CASES[name]
    tensors = [ints(4, 4) if name == "whole matrices" else X.clone() for _ in given]
    with pytest.raises(LayoutError, match=message) as caught:
        check(function, tensors, [layout(text) for text in given], GRID, allowed=DEFAULT)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Layout((Cut(("pp",)), Cut())), "names the axis pp, and @m has dp, tp"),
        (Layout((Cut(("tp",)), Cut(("tp",)))), "names an axis twice"),
        (Layout((Cut(("tp",)),)), "has cuts of 1 dimensions, and the tensor has 2"),
        (Layout((Cut(), Cut(("tp",))), ("tp",)), "names an axis twice"),
    ],
)
def test_layouts_that_are_given_fit_the_tensor(given: Layout, message: str) -> None:
    owner = trace(torch.neg, X)
    placeholder = next(iter(owner.graph.nodes))
    with pytest.raises(LayoutError, match=message):
        propagate(owner.graph, GRID, {placeholder: given})


def test_a_kernel_that_draws_its_mask() -> None:
    """Called by its own name; of torch's function, the mask follows from a key."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    owner = trace(lambda q: kernel(q, q, q, 0.5), ints(2, 4, 3, 2))
    placeholder = next(iter(owner.graph.nodes))
    given = {placeholder: layout("-,tp,-,-")}
    with pytest.raises(LayoutError, match="has dropout, whose numbers a piece could not draw"):
        propagate(owner.graph, GRID, given, allowed=DEFAULT)


def test_an_op_without_a_rule_runs_on_copies() -> None:
    run = check(torch.linalg.inv, [ints(3, 3) + 9 * torch.eye(3)], [layout("-,-|tp")], GRID)
    assert [change.value for change in run.changes] == ["reduce"]
    assert run.outputs == [layout("-,-")]
