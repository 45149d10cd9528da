"""Ops of losses, layers and lists of tensors, on which their rules are tried in all layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from .op_cases import ATEN, OpCase, case, indices, ints

X, Y = ints(4, 3), ints(4, 3).flip(0)
IMAGE = ints(4, 4, 4, 4)
NORMED = (IMAGE, ints(4), ints(4))


def losses(name: str, *more: Any) -> dict[str, OpCase]:
    """A loss and its derivative, by each of the reductions."""
    forward, backward = getattr(ATEN, name), getattr(ATEN, f"{name}_backward")
    found = {}
    for reduction, word in enumerate(("none", "mean", "sum")):
        gradient = ints(4, 3) if reduction == 0 else ints() + 2
        found[f"{name} {word}"] = case(last(forward, reduction, *more), X, Y, tolerance=1e-12)
        found[f"{name} backward {word}"] = case(
            last(backward, reduction, *more), gradient, X, Y, tolerance=1e-12
        )
    return found


def last(op: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """An op of tensors, with the arguments that follow them."""
    return lambda *tensors: op(*tensors, *arguments)


def entropy(reduction: int) -> Callable[..., Any]:
    """A loss of numbers between 0 and 1, and its derivative."""

    def both(x: torch.Tensor, y: torch.Tensor) -> Any:
        given, target = x.sigmoid(), y.sigmoid()
        loss = ATEN.binary_cross_entropy(given, target, None, reduction)
        return loss, ATEN.binary_cross_entropy_backward(loss, given, target, None, reduction)

    return both


def nll_2d(reduction: int) -> Callable[..., Any]:
    return lambda x, t, w: ATEN.nll_loss2d_forward(x, t, w, reduction, 2)


def nll_2d_backward(reduction: int) -> Callable[..., Any]:
    return lambda g, x, t, w: ATEN.nll_loss2d_backward(g, x, t, w, reduction, 2, w.sum())


def batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    return ATEN.native_batch_norm(x, w, b, None, None, True, 0.25, 1e-5)


def at_rest(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    return ATEN.native_batch_norm(x, w, b, w * 2, w.abs() + 1, False, 0.25, 1e-5)[0]


def batch_norm_backward(training: bool) -> Callable[..., Any]:
    return lambda g, x, w: ATEN.native_batch_norm_backward(
        *(g, x, w, x.new_zeros(4), x.new_ones(4), w * 0.5, w.abs() + 1),
        *(training, 1e-5, [True, True, True]),
    )


def group_norm_backward(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    statistics = x.flatten(2).sum(-1).view(4, 2, 2).sum(-1)
    return ATEN.native_group_norm_backward(
        g, x, statistics, statistics.abs(), w, 4, 4, 16, 2, [True, True, True]
    )


PIXELS = {
    "adaptive maximum": lambda x: functional.adaptive_max_pool2d(x, 2, return_indices=True),
    "upsample nearest": lambda x: ATEN.upsample_nearest2d(x, [8, 8], 2.0, 2.0),
    "upsample nearest backward": lambda g: ATEN.upsample_nearest2d_backward(
        g, [4, 4], [4, 4, 2, 2], 2.0, 2.0
    ),
    "upsample bilinear": lambda x: ATEN.upsample_bilinear2d(x, [8, 8], False, 2.0, 2.0),
    "reflection": lambda x: ATEN.reflection_pad2d(x, [1, 1, 1, 1]),
    "replication backward": lambda g: ATEN.replication_pad2d_backward(
        g, g[..., 1:3, 1:3], [1, 1, 1, 1]
    ),
    "pooling of volumes": lambda x: ATEN.avg_pool3d(x, [2, 2, 2]),
    "maximum of volumes": lambda x: ATEN.max_pool3d_with_indices(x, [2, 2, 2]),
    "columns": lambda x: functional.unfold(x, 2),
    "pixel shuffle": lambda x: functional.pixel_shuffle(x, 2),
    "channel shuffle": lambda x: functional.channel_shuffle(x, 2),
}


def writes_to_a_list(x: torch.Tensor) -> list[torch.Tensor]:
    made, other = [x.clone(), x * 2], [x * 3, x * 4]
    torch._foreach_add_(made, other, alpha=2)
    torch._foreach_mul_(made, 5.0)
    return made


CASES: dict[str, OpCase] = {
    # losses
    **losses("mse_loss"),
    **losses("smooth_l1_loss", 1.0),
    **losses("huber_loss", 1.0),
    **losses("soft_margin_loss"),
    "entropy": case(entropy(0), X, Y, tolerance=1e-12),
    "entropy mean": case(entropy(1), X, Y, tolerance=1e-12),
    "entropy sum": case(entropy(2), X, Y, tolerance=1e-12),
    "logits": case(
        lambda x, t, w: functional.binary_cross_entropy_with_logits(x, t, pos_weight=w),
        *(X, Y, ints(3)),
        tolerance=1e-12,
    ),
    **{
        f"nll of images {name}": case(
            nll_2d(r),
            *(ints(3, 4, 2, 2), indices(4, 3, 2, 2), ints(4).abs() + 1),
            tolerance=1e-12,
        )
        for r, name in enumerate(("none", "mean", "sum"))
    },
    **{
        f"nll of images backward {name}": case(
            nll_2d_backward(r),
            *((ints(3, 2, 2) if r == 0 else ints()), ints(3, 4, 2, 2)),
            *(indices(4, 3, 2, 2), ints(4).abs() + 1),
            tolerance=1e-12,
        )
        for r, name in enumerate(("none", "mean", "sum"))
    },
    # layers
    "batch norm": case(batch_norm, *NORMED, tolerance=1e-12),
    "batch norm at rest": case(at_rest, *NORMED, tolerance=1e-12),
    "batch norm of rows": case(batch_norm, ints(6, 4), *NORMED[1:], tolerance=1e-12),
    "batch norm backward": case(
        batch_norm_backward(True), IMAGE, IMAGE.flip(0), ints(4), tolerance=1e-11
    ),
    "batch norm backward at rest": case(
        batch_norm_backward(False), IMAGE, IMAGE.flip(0), ints(4), tolerance=1e-11
    ),
    "group norm of channels": case(
        lambda x, w, b: ATEN.native_group_norm(x, w, b, 4, 4, 16, 2, 1e-5), *NORMED, tolerance=1e-12
    ),
    "group norm backward": case(
        group_norm_backward, IMAGE, IMAGE.flip(1), ints(4), tolerance=1e-10
    ),
    **{name: case(function, IMAGE, tolerance=1e-12) for name, function in PIXELS.items()},
    "blocks": case(lambda x: functional.fold(x, (3, 3), 2), ints(3, 8, 4)),
    "glu": case(lambda x: functional.glu(x, 1), ints(3, 8, 2), tolerance=1e-12),
    "glu packed": case(
        lambda x, y: functional.glu(torch.cat([x, y], 1), 1),
        ints(3, 4),
        ints(3, 4),
        tolerance=1e-12,
    ),
    "glu backward": case(
        lambda g, x: ATEN.glu_backward(g, x, 1), ints(3, 4), ints(3, 8), tolerance=1e-12
    ),
    **{
        f"{name} backward": case(
            last(getattr(ATEN, f"{name}_backward")), ints(4, 3), X, tolerance=1e-12
        )
        for name in ("silu", "mish", "hardswish")
    },
    "prelu": case(lambda x, w: functional.prelu(x, w), ints(4, 3), ints(3)),
    "log sigmoid": case(functional.logsigmoid, ints(4, 3), tolerance=1e-12),
    # views and indices
    "unfold": case(lambda x: x.unfold(1, 3, 2) * 1, ints(3, 7)),
    "unfold backward": case(lambda g: ATEN.unfold_backward(g, [3, 7], 1, 3, 2), ints(3, 3, 3)),
    "diagonal": case(lambda x: x.diagonal(1, 0, 2) * 1, ints(3, 4, 3)),
    "diagonal backward": case(lambda g: ATEN.diagonal_backward(g, [4, 4, 5], 0, 0, 1), ints(5, 4)),
    "diagonals": case(lambda x: torch.diag_embed(x), ints(3, 4)),
    "strided": case(lambda x: x.as_strided((2, 6, 2), (2, 4, 1)) * 1, ints(4, 6)),
    "real": case(lambda x: torch.view_as_real(torch.view_as_complex(x).conj() * 2), ints(4, 3, 2)),
    "select scatter": case(lambda x, y: torch.select_scatter(x, y, 1, 2), ints(4, 3), ints(4)),
    "slice scatter": case(lambda x, y: torch.slice_scatter(x, y, 1, 1, 3), ints(4, 5), ints(4, 2)),
    "index fill": case(lambda x, i: x.index_fill(1, i, 2.0), ints(4, 5), indices(5, 2)),
    "index copy": case(
        lambda x, y: x.index_copy(1, torch.tensor([2, 0]), y), ints(4, 5), ints(4, 2)
    ),
    "scatter largest": case(
        lambda x, i, v: x.scatter_reduce(1, i, v, "amax"), ints(4, 5), indices(5, 4, 2), ints(4, 2)
    ),
    "one hot": case(lambda i: functional.one_hot(i, 5), indices(5, 4, 3)),
    "repeat interleave": case(lambda x: x.repeat_interleave(2, 1), ints(4, 3)),
    "bucketize": case(lambda x: torch.bucketize(x, torch.tensor([-1.0, 2.0]).double()), X),
    "write to a column": case(lambda x: x.index_put((torch.tensor([1]),), x[:1]), ints(4, 3)),
    "transposed in place": case(lambda x: (x * 1).transpose_(0, 1) + x.t(), ints(4, 3)),
    "parts written to": case(
        lambda x: [part.add_(part * 1) for part in ATEN.unsafe_split(x * 1, 2, 1)], ints(3, 4)
    ),
    # along a dimension
    "var mean": case(lambda x: torch.var_mean(x, 1), ints(3, 5), tolerance=1e-12),
    "std mean": case(
        lambda x: torch.std_mean(x, (0, 1), keepdim=True), ints(3, 5), tolerance=1e-12
    ),
    "cummax": case(lambda x: x.cummax(1)[0], ints(4, 5)),
    "logcumsumexp": case(lambda x: x.logcumsumexp(0), ints(4, 5), tolerance=1e-12),
    "median": case(lambda x: x.median(1)[0], ints(4, 5)),
    "aminmax": case(lambda x: torch.aminmax(x, dim=1), ints(4, 5)),
    "count": case(lambda x: x.count_nonzero(1), ints(4, 5)),
    "nansum": case(lambda x: x.nansum(1), ints(4, 5)),
    "renorm": case(lambda x: x.renorm(2, 0, 1.0), ints(4, 3), tolerance=1e-7),
    "cross": case(torch.linalg.cross, ints(4, 3), ints(4, 3)),
    # random draws
    "gumbel": case(
        lambda x: x - torch.empty_like(x).exponential_().log(), ints(4, 3), tolerance=1e-12
    ),
    # lists
    "list products": case(lambda x, y: torch._foreach_mul([x, y], 2.0), X, ints(5)),
    "list norms": case(
        lambda x, y: torch.stack(torch._foreach_norm([x, y])), X, ints(5), tolerance=1e-12
    ),
    "list writes": case(writes_to_a_list, X),
    "list numbers": case(lambda x, y: torch._foreach_add([x, y], [1.0, 2.0]), X, ints(5)),
}
