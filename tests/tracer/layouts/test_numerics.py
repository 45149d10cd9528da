"""Reductions over cut dimensions in every float type: what one rank computes, but for rounding.

Partial results are kept and reduced in the type in which torch adds up, and are cast at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from cg.tracer.graph.layouts.versions import End

from ...sampling import examples
from .simulation import check, layout, mesh, simulate

ATEN = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32, torch.float64)
ROWS, COLUMNS = 7, 11
TARGETS = torch.tensor([10, 0, 3, 4, 4, 9, 3])
MESHES = {"2": mesh(tp=2), "3": mesh(tp=3), "2 x 2": mesh(dp=2, tp=2), "13": mesh(tp=13)}
ODD = (math.inf, -math.inf, math.nan)
CUTS = ("tp,-", "-,tp")

Function = Callable[..., Any]

OF_ONE: dict[str, Function] = {
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(0, keepdim=True),
    "sum of columns": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(0),
    "mean of columns": lambda x: x.mean((-1,), keepdim=True),
    "mean in float32": lambda x: x.mean(1, dtype=torch.float32),
    "product": lambda x: x[:2].prod(1),
    "variance": lambda x: x.var(),
    "variance of columns": lambda x: x.var(1, keepdim=True),
    "variance and mean": lambda x: torch.var_mean(x, 0, correction=0),
    "deviation and mean": lambda x: torch.std_mean(x, 1),
    **{
        f"norm {order}": partial(torch.linalg.vector_norm, ord=order, dim=1)
        for order in (0.5, 1, 2, 3, math.inf)
    },
    "norm of all": lambda x: torch.linalg.vector_norm(x),
    "norm in float64": lambda x: torch.linalg.vector_norm(x, 2, 0, dtype=torch.float64),
    "logsumexp": lambda x: x.logsumexp(1),
    "logsumexp of all": lambda x: x.logsumexp((0, 1), keepdim=True),
    "normalize": lambda x: functional.normalize(x, dim=-1),
    "softmax": lambda x: x.softmax(-1),
    "softmax of rows": lambda x: x.softmax(0),
    "log softmax": lambda x: x.log_softmax(-1),
    "largest": lambda x: x.amax(1),
    "least": lambda x: x.min(),
    "batch norm": lambda x: functional.batch_norm(x, None, None, training=True),
}
OF_CLASSES: dict[str, Function] = {
    "cross entropy": lambda x, t: functional.cross_entropy(x, t),
    "cross entropy, added up": partial(functional.cross_entropy, reduction="sum"),
    "cross entropy of rows": partial(functional.cross_entropy, reduction="none"),
    "cross entropy of some": partial(functional.cross_entropy, ignore_index=4),
    "cross entropy, smooth": partial(functional.cross_entropy, label_smoothing=0.1),
    "cross entropy, weighted": lambda x, t: functional.cross_entropy(
        x, t, x[0].abs() / (x[0].abs().amax() + 1), ignore_index=3
    ),
    "cross entropy, weighted and added up": lambda x, t: functional.cross_entropy(
        x, t, x[0].abs() / (x[0].abs().amax() + 1), ignore_index=3, reduction="sum"
    ),
}
OF_TWO: dict[str, Function] = {
    **{
        f"{loss.__name__}, {reduction}": partial(loss, reduction=reduction)
        for loss in (functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss)
        for reduction in ("mean", "sum")
    },
    "binary cross entropy": lambda x, y: functional.binary_cross_entropy_with_logits(
        x, y.sigmoid()
    ),
    "mean squared error, backward": lambda x, y: ATEN.mse_loss_backward(x.new_ones(()), x, y, 1),
    "softmax, backward": lambda x, y: ATEN._softmax_backward_data(
        x, y.softmax(-1), -1, input_dtype=x.dtype
    ),
    "log softmax, backward": lambda x, y: ATEN._log_softmax_backward_data(
        x, y.log_softmax(-1), -1, input_dtype=x.dtype
    ),
    "cosine": lambda x, y: functional.cosine_similarity(x, y),
}
FUNCTIONS = {**OF_ONE, **OF_TWO, **OF_CLASSES}


def compare(function: Function, tensors: Sequence[torch.Tensor], axes: str, place: str) -> None:
    """Compare what ranks compute of pieces with torch, to a few units in the last place.

    Args:
        function: of one or two tensors of a type, [ROWS, COLUMNS], and of targets.
        tensors: these.
        axes: that cut the tensors; targets are whole.
        place: the mesh.
    """
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    made = function(*tensors)
    types = [each.dtype for each in (made if isinstance(made, tuple) else (made,))]
    eps = 16 * max(torch.finfo(dtype).eps for dtype in (*types, floats[0].dtype))
    check(
        *(function, tensors, [layout(axes if t.dim() == 2 else "-") for t in tensors]),
        MESHES[place],
        tolerance=eps,
        absolute=eps * max(1.0, *map(_largest, floats)),
        ends=[End()] * 4,
    )


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def drawn(seed: int, dtype: torch.dtype, scale: float, middle: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=generator)
    return (x * scale + middle).to(dtype)


@pytest.mark.parametrize("name", FUNCTIONS)
@given(data=st.data())
@examples(32)
def test_reductions_of_pieces(name: str, data: st.DataObject) -> None:
    function = FUNCTIONS[name]
    dtype = data.draw(st.sampled_from(FLOATS))
    scale = data.draw(st.sampled_from([1.0, 1e-3, 30.0, 300.0]))
    middle = data.draw(st.sampled_from([0.0, 10.0, 300.0]))
    if name == "batch norm":  # which divides by a deviation that would be lost in rounding
        middle = min(middle, scale)
    place = data.draw(st.sampled_from(list(MESHES)))
    axes = data.draw(st.sampled_from([*CUTS, *(["dp,tp", "-,dp.tp"] if "x" in place else [])]))
    seeds = data.draw(st.tuples(*(st.integers(0, 99) for _ in range(1 + (name in OF_TWO)))))
    tensors = [drawn(seed, dtype, scale, middle) for seed in seeds]
    odd = None if "and mean" in name else data.draw(st.sampled_from([None, *ODD]))
    if odd is not None:
        rows = data.draw(st.sampled_from([slice(0, 1), slice(2, 3), slice(6, 7)]))
        columns = data.draw(st.sampled_from([slice(None), slice(0, 1), slice(10, 11)]))
        tensors[0][rows, columns] = odd
    compare(function, [*tensors, *([TARGETS] if name in OF_CLASSES else [])], axes, place)


HUGE = torch.tensor(
    [[60000.0, 60000, -60000, -59000, 3], [1, -1, 0.5, 300, 2]], dtype=torch.float16
)


BEYOND: dict[str, Function] = {
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1),
    "variance": lambda x: x[1:].var(1),
    "norm": lambda x: torch.linalg.vector_norm(x[1:], dim=1),
    "normalize": lambda x: functional.normalize(x[1:], dim=1),
    "loss": lambda x: functional.l1_loss(x, x * 0.9, reduction="none").mean(),
    "a cast": lambda x: (x.float().sum(1) / 100).half(),
}


@pytest.mark.parametrize("name", BEYOND)
def test_no_partial_result_is_beyond_float16(name: str) -> None:
    check(BEYOND[name], [HUGE], [layout("-,tp")], mesh(tp=2), tolerance=1e-3, ends=[End()])


def test_the_mean_of_many_is_not_rounded_on_the_way() -> None:
    x = torch.linspace(-0.1, 1, 3 * 4096).view(3, 4096).to(torch.bfloat16)
    for axes in "tp,-", "-,tp":
        check(torch.mean, [x], [layout(axes)], mesh(tp=3), ends=[End()])


def test_terms_of_gradients_stay_summands_of_their_type() -> None:
    """A bias's gradient is not reduced in each backward: its summands go into `.grad`."""
    x = torch.ones(6, 4, dtype=torch.float16)
    run, _ = simulate(
        lambda g: g.sum(0).view(2, 2) + g.mean(0).view(2, 2),
        *([x], [layout("tp,-")], mesh(tp=2)),
        ends=[End(None, True)],
    )
    assert run.changes == []
    assert run.outputs == [layout("-,-|tp")]
    run, _ = simulate(lambda g: g.sum(0), [x], [layout("tp,-")], mesh(tp=2), ends=[End()])
    assert [t.before.node.meta["val"].dtype for t in run.propagation.transfers] == [torch.float32]
