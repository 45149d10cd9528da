"""Every rule in all layouts: what ranks compute on pieces is the piece of what the op computes."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import fx

from cg.ir.layout import Layout
from cg.ir.types import Place
from cg.tracer.graph.layouts.change import DEFAULT

from ...sampling import scale
from . import layer_cases, op_cases
from .op_cases import OpCase
from .simulation import check, cuts, layout, mesh, trace

CASES = {**op_cases.CASES, **layer_cases.CASES}
MESHES = {"3": mesh(tp=3), "2 x 2": mesh(dp=2, tp=2), "5": mesh(tp=5)}
"""Of which 3 makes uneven pieces of most dimensions, and 5 empty ones."""

MOST = 2 if scale() == 1 else 9
"""Layouts of an op that a run tries on a mesh, spread over all of them; more with --slow."""


@functools.lru_cache(maxsize=4)  # the meshes of an op follow each other
def traced(name: str) -> fx.GraphModule:
    return trace(CASES[name].function, *CASES[name].tensors)


def layouts(op: OpCase, place: Place) -> Iterator[tuple[Layout, ...]]:
    every = [
        list(cuts(tensor.dim(), place, summands))
        for tensor, summands in zip(op.tensors, op.summands, strict=True)
    ]
    count = math.prod(map(len, every))
    for number in random.Random(0).sample(range(count), MOST) if count > MOST else range(count):
        yield combination(every, number)


def combination(choices: Sequence[Sequence[Layout]], number: int) -> tuple[Layout, ...]:
    """The one of this number in `itertools.product` of the choices, of which there are many."""
    found: list[Layout] = []
    for each in reversed(choices):
        number, index = divmod(number, len(each))
        found.append(each[index])
    return tuple(reversed(found))


@pytest.mark.grid(1)
@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_all_layouts(name: str, axes: str) -> None:
    op, place = CASES[name], MESHES[axes]
    graph = traced(name)
    for given in layouts(op, place):
        check(op.function, op.tensors, given, place, traced=graph, tolerance=op.tolerance)


TAKING_ENTRIES = [
    name
    for name in CASES
    if name.startswith(("index", "gather", "scatter", "embed", "slice backward"))
]


@pytest.mark.parametrize("name", TAKING_ENTRIES)
def test_entries_along_a_dimension_in_zigzag_order(name: str) -> None:
    op, place = CASES[name], mesh(tp=2)
    for number, tensor in enumerate(op.tensors):
        for dim in range(tensor.dim()):
            layouts = [layout(",".join("-" * other.dim())) for other in op.tensors]
            cut = ["-"] * tensor.dim()
            cut[dim] = "tp~"
            layouts[number] = layout(",".join(cut))
            check(op.function, op.tensors, layouts, place, traced=traced(name))


NOTHING: list[str] = []
REDUCE = ["reduce"]
EXPECTED = [
    ("add", "dp,tp", "dp,tp", "dp,tp", NOTHING),
    ("add", "-,-|tp", "-,-|tp", "-,-|tp", NOTHING),
    ("add", "-,-|tp", "-,-", "-,-", REDUCE),
    ("add", "-,-|tp", "tp,-", "tp,-", REDUCE),
    ("add", "dp,-", "-,-", "dp,-", ["slice"]),
    ("add broadcast", "dp,tp", "tp", "dp,tp", NOTHING),
    ("add scalar", "-,-|tp", "-,-", REDUCE),
    ("mul", "-,-|tp", "dp,-", "dp,-|tp", ["slice"]),
    ("mul", "-,-|tp", "-,-|tp", "-,-|tp", REDUCE),
    ("where", "dp,-", "dp,-", "dp,-", NOTHING),
    ("in place", "-,tp", "-,-", "-,tp", NOTHING),
    ("view split", "-,tp", "-,-,tp,-", NOTHING),
    ("view merge", "-,-,tp,-", "-,tp", NOTHING),
    ("view merge", "-,dp,-,-", "3*dp,-", NOTHING),
    ("permute", "dp,-,tp", "tp,dp,-", NOTHING),
    ("select", "dp,tp", "dp|tp", NOTHING),
    ("split", "-,3*tp", "-,tp", NOTHING),
    ("cat", "-,tp", "-,tp", "-,2*tp", NOTHING),
    ("mm", "dp,-", "-,tp", "dp,tp", NOTHING),
    ("mm", "dp,tp", "tp,-", "dp,-|tp", NOTHING),
    ("mm", "dp,-|tp", "-,-", "dp,-|tp", NOTHING),
    ("mm", "dp,tp", "-,-", "dp,-|tp", ["slice"]),
    ("bmm", "tp,dp,-", "tp,-,-", "tp,dp,-", NOTHING),
    ("addmm", "-", "dp,tp", "tp,-", "dp,-", REDUCE),
    ("linear", "dp,-,-", "tp,-", "tp", "dp,-,tp", NOTHING),
    ("triangular", "dp,tp,-,-", "tp,-,-", "dp,tp,-,-", NOTHING),
    ("triangular", "dp,-,-,-", "-,-,tp", "dp,-,-,tp", NOTHING),
    ("triangular", "-,-,-,-", "-,-,-|tp", "-,-,-,-|tp", NOTHING),
    ("solve", "dp,tp,-,-", "tp,-,-", "dp,tp,-,-", NOTHING),
    ("inverse", "dp,-,-", "dp,-,-", NOTHING),
    ("sum", "dp,tp", "|dp.tp", NOTHING),
    ("sum dim", "dp,tp", "dp|tp", NOTHING),
    ("mean", "dp,-", "|dp", NOTHING),
    ("softmax", "dp,-", "dp,-", NOTHING),
    ("softmax", "-,tp", "-,tp", ["reduce", "reduce"]),
    ("cross entropy", "dp,-", "dp", "|dp", REDUCE),
    ("layer norm", "dp,-,-", "-", "-", "dp,-,-", NOTHING),
    ("attention", "dp,tp,-,-", "dp,tp,-,-", "dp,tp,-,-", "dp,tp,-,-", NOTHING),
    ("attention of groups", "-,tp,-,-", "-,tp,-,-", "-,tp,-,-", "-,-,-,-", "-,tp,-,-", NOTHING),
    ("embedding", "tp,-", "dp,-", "dp,-,-|tp", NOTHING),
    ("embedding gradient", "dp,-,-", "dp,-", "tp,-|dp", "tp,-|dp", NOTHING),
    ("index rows", "dp,-,-", "dp", "dp,-", NOTHING),
    ("gather", "-,tp", "-,-", "-,-|tp", NOTHING),
    ("gather of int32", "-,tp", "-,-", "-,-|tp", NOTHING),
    ("index from the end", "dp,-", "-", "-,-|dp", NOTHING),
    ("index add", "dp,-", "-", "-,-", "dp,-", NOTHING),
    ("add to zeros", "dp", "dp,-", "-,-|dp", NOTHING),
    ("index add", "-,-", "dp", "dp,-", "-,-", REDUCE),
    ("gather of bools", "-,tp", "-,-", "-,-", REDUCE),
    ("embedding rows by frequency", "-,-,-", "-,-", "tp,-", "tp,-", NOTHING),
    ("norm of complex numbers", "-,tp", "-", REDUCE),
    ("slice backward", "dp,tp", "dp,-|tp", NOTHING),
    ("dropout", "dp,tp", "dp,tp", NOTHING),
    ("zeros", "dp,-", "dp,-", NOTHING),
]


@pytest.mark.parametrize("row", EXPECTED, ids=lambda row: " ".join(map(str, row)))
def test_layouts_that_follow(row: tuple[object, ...]) -> None:
    """The last two columns: the layout of the first result, and the transfers."""
    name, *given, expected, changes = row
    op = CASES[str(name)]
    assert isinstance(changes, list)
    layouts = [layout(str(text)) for text in given]
    run = check(
        op.function,
        op.tensors,
        layouts,
        mesh(dp=2, tp=2),
        traced=traced(str(name)),
        tolerance=op.tolerance,
        allowed=DEFAULT,
    )
    assert run.outputs[0] == layout(str(expected))
    assert [change.value for change in run.changes] == changes


@pytest.mark.parametrize("summands", range(3))
def test_a_slope_of_prelu_is_no_factor_of_its_gradients(summands: int) -> None:
    """Where an input is positive, its gradient is that of the result."""
    layouts = [layout("-,-|dp" if index == summands else "-,-") for index in range(3)]
    grad, x, slope = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(0)).double()
    backward = torch.ops.aten._prelu_kernel_backward.default
    check(backward, [grad, x, slope], layouts, mesh(dp=2), tolerance=1e-9)
