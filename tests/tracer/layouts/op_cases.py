"""Ops with small tensors, on which their rules are tried in all layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cg.tracer.method.float8.formula import product, quantised, scales
from cg.tracer.method.quantized.quantized_product import quantized_product

ATEN, CG = torch.ops.aten, torch.ops.cg


@dataclass(frozen=True)
class OpCase:
    """A function of tensors.

    Attributes:
        function: it.
        tensors: what it is called with.
        summands: which of them may be sums over ranks: those that are not indices.
        tolerance: 0 where sums are exact.
    """

    function: Callable[..., Any]
    tensors: Sequence[torch.Tensor]
    summands: tuple[bool, ...] = ()
    tolerance: float = 0.0


def ints(*shape: int) -> torch.Tensor:
    """Small integers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randint(-3, 4, shape, generator=generator).double()


def indices(high: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(high)
    return torch.randint(high, shape, generator=generator)


def case(function: Callable[..., Any], *tensors: torch.Tensor, tolerance: float = 0.0) -> OpCase:
    floating = tuple(tensor.is_floating_point() for tensor in tensors)
    return OpCase(function, tensors, floating, tolerance)


def attention_backward(g: torch.Tensor, *qkv: torch.Tensor) -> Any:
    out, statistics = ATEN._scaled_dot_product_flash_attention_for_cpu(*qkv, 0.0, True)
    return ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        g, *qkv, out, statistics, 0.0, True
    )


def dropout_attention(*operands: torch.Tensor, causal: bool = False) -> Any:
    q, k, v, *mask = operands
    mask_of = {"attn_mask": mask[0]} if mask else {}
    return CG.dropout_attention(q, k, v, words(), 0.3, causal, **mask_of)


def dropout_attention_backward(g: torch.Tensor, *operands: torch.Tensor) -> Any:
    q, k, v, *mask = operands
    out, statistics = dropout_attention(*operands, causal=not mask)
    mask_of = {"attn_mask": mask[0], "of_mask": True} if mask else {}
    return CG.dropout_attention_backward(
        g, q, k, v, out, statistics, words(), 0.3, not mask, **mask_of
    )


def words() -> torch.Tensor:
    """The two words from which a mask follows, as operators make them."""
    return torch.arange(7, 9)


def float8_product(by_row: bool) -> Callable[..., Any]:
    """A product of float8 casts, with their scales."""

    def scaled(value: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        scale = scales(value, dtype, by_row)
        return quantised(value, scale, dtype), scale

    def function(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        pair = scaled(left, torch.float8_e5m2), scaled(right, torch.float8_e4m3fn)
        return product(*pair, torch.float32, False)

    return function


def quantized(has_zero: bool) -> Callable[..., Any]:
    """A product with a quantized weight: the tensors of a word of outputs, or plain levels."""

    def function(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, *z: torch.Tensor) -> Any:
        if has_zero:
            words, points = w.int() + 0x12345678, z[0].int() + 0x01234567
            options = {"outputs_per_word": 8, "offset": 1, "interleaved": True}
            return quantized_product(x, words, s, points, summands=2, **options)  # type: ignore[arg-type]
        return quantized_product(x, w.to(torch.int8), s, None, summands=2)

    return function


def nll(reduction: int) -> Callable[..., Any]:
    return lambda x, t, w: ATEN.nll_loss_forward(x, t, w, reduction, 2)


def nll_backward(reduction: int) -> Callable[..., Any]:
    return lambda g, x, t, w: ATEN.nll_loss_backward(g, x, t, w, reduction, 2, w.sum())


def ctc(x: torch.Tensor, t: torch.Tensor, n: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return CG.ctc_loss(x, t + 1, n, m, 0, False)[0]  # type: ignore[no-any-return]


def ctc_backward(g: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
    x, t, n, m = rows
    kept = CG.ctc_loss(x, t + 1, n, m, 0, False)
    return CG.ctc_loss_backward(g, x, t + 1, n, m, *kept, 0, False)  # type: ignore[no-any-return]


def regular(a: torch.Tensor) -> torch.Tensor:
    """Matrices with inverses."""
    return a + 9 * torch.eye(a.shape[-1], dtype=a.dtype)


ROWS_OF_CTC = (indices(4, 4, 3), torch.tensor([6, 5, 6, 4]), torch.tensor([3, 2, 0, 1]))


OF_BORDERS = torch.tensor([[0, 3], [3, 5], [0, 0], [6, 3]])
"""Indices below 7, among them the first and the last of what two ranks hold."""


def _with_zeros(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x[:, mask] = 0
    return x


def _with_ones(x: torch.Tensor) -> torch.Tensor:
    x[1] = 1
    return x


CASES: dict[str, OpCase] = {
    "quantized_product": case(quantized(False), ints(2, 3, 2, 1), ints(3, 2, 3, 2), ints(3, 1, 3)),
    "quantized_product, words": case(
        quantized(True), ints(3, 2, 3, 1), ints(3, 1, 2, 3), ints(3, 8, 2), ints(3, 1, 2)
    ),
    "float8_mm, by row": case(float8_product(by_row=True), ints(4, 6), ints(3, 6)),
    "float8_mm": case(float8_product(by_row=False), ints(4, 6), ints(3, 6), tolerance=1e-6),
    # pointwise
    "add": case(torch.add, ints(4, 6), ints(4, 6)),
    "add broadcast": case(torch.add, ints(4, 6), ints(6)),
    "add middle": case(lambda x, y: x[:, None] + y, ints(3, 4), ints(5, 4)),
    "add scalar": case(lambda x: x + 1, ints(3, 5)),
    "sub": case(torch.sub, ints(3, 2), ints(1, 2)),
    "mul": case(torch.mul, ints(4, 3), ints(4, 3)),
    "mul itself": case(lambda x: x * x, ints(4, 3)),
    "mul scalar": case(lambda x: x * 3, ints(5)),
    "div": case(lambda x, y: x / (y.abs() + 1), ints(4, 3), ints(3), tolerance=1e-12),
    "div scalar": case(lambda x: x / 2, ints(4, 3)),
    "div mode": case(lambda x: torch.div(x, 2, rounding_mode="floor"), ints(4, 3)),
    "neg": case(torch.neg, ints(4, 3)),
    "clone": case(torch.clone, ints(4, 3)),
    "cast": case(lambda x: x.float().long(), ints(4, 3)),
    "where": case(lambda x, y: torch.where(x > 0, x, y), ints(4, 3), ints(4, 1)),
    "masked fill": case(lambda x, y: x.masked_fill(y > 0, 0), ints(4, 3), ints(4, 1)),
    "masked fill 1": case(lambda x, y: x.masked_fill(y > 0, 1), ints(4, 3), ints(4, 1)),
    "relu": case(torch.relu, ints(4, 3)),
    "relu backward": case(lambda g, x: ATEN.threshold_backward(g, x, 0), ints(4, 3), ints(4, 3)),
    "gelu backward": case(lambda g, x: ATEN.gelu_backward(g, x), ints(4), ints(4), tolerance=1e-12),
    "comparison": case(lambda x, y: (x > y) & (x != 0), ints(4, 3), ints(3)),
    "scalar": case(lambda x, y: x * y, ints(4, 3), ints()),
    "in place": case(lambda x, y: x.clone().mul_(2), ints(4, 3), ints(4, 3)),
    # creation
    "full like": case(lambda x: x + torch.full_like(x, 2), ints(4, 3)),
    "zeros": case(lambda x: x - torch.zeros(4, 3, dtype=torch.float64), ints(4, 3)),
    "arange": case(lambda x: x + torch.arange(5.0, dtype=torch.float64), ints(3, 5)),
    "arange step": case(lambda x: x * torch.arange(1, 9, 2), ints(3, 4)),
    "new ones": case(lambda x: x * x.new_ones(5, 3).sum(0), ints(5, 3)),
    "eye": case(lambda x: x + torch.eye(4, dtype=torch.float64), ints(4, 4)),
    "constant": case(lambda x: x * torch.tensor([1.0, 2, 3], dtype=torch.float64), ints(5, 3)),
    "constant scalar": case(lambda x: x * torch.tensor(2.0, dtype=torch.float64), ints(5, 3)),
    "constant copied": case(
        lambda x: x.sum(0) + ATEN.lift_fresh_copy(torch.tensor([1.0, 2, 3], dtype=torch.float64)),
        ints(5, 3),
    ),
    # views
    "view split": case(lambda x: x.view(3, 2, 4, 2), ints(6, 8)),
    "view merge": case(lambda x: x.view(6, 20) * 2, ints(3, 2, 4, 5)),
    "view flat": case(lambda x: x.view(-1), ints(3, 4)),
    "view other": case(lambda x: x.view(4, 6), ints(6, 4)),
    "view ones": case(lambda x: x.view(1, 6, 1, 4), ints(6, 4)),
    "view back": case(lambda x: x.view(15, 4).view(3, 5, 2, 2), ints(3, 5, 4)),
    "view as bits": case(lambda x: x.view(torch.int64) >> 52, ints(6, 4)),
    "view as halves": case(lambda x: x.view(torch.float32) * 2, ints(6, 4)),
    "cast to float8": case(lambda x: x.to(torch.float8_e4m3fn).double() * 2, ints(6, 4)),
    "float8 as bytes": case(lambda x: x.to(torch.float8_e4m3fn).view(torch.uint8) & 7, ints(6, 4)),
    "view empty": case(lambda x: x.view(0, 6), ints(2, 0, 3)),
    "permute": case(lambda x: x.permute(2, 0, 1), ints(2, 3, 4)),
    "transpose": case(lambda x: x.transpose(-1, 0), ints(2, 3, 4)),
    "t": case(lambda x: ATEN.t(x), ints(3, 4)),
    "unsqueeze": case(lambda x: x.unsqueeze(-1), ints(3, 4)),
    "squeeze": case(lambda x: x.squeeze(), ints(3, 1, 4, 1)),
    "squeeze dim": case(lambda x: x.squeeze(1), ints(3, 1, 4)),
    "expand": case(lambda x: x.expand(5, 3, 4), ints(3, 1)),
    "expand back": case(lambda x: x.expand(-1, 4, -1).reshape(3, 8) * 1, ints(3, 1, 2)),
    "repeat": case(lambda x: x.repeat(2, 1, 2), ints(3, 4)),
    "select": case(lambda x: x.select(1, -1), ints(3, 4)),
    "select of a packed one": case(lambda x, y: torch.cat([x, y], 1)[:, 5], ints(2, 4), ints(2, 4)),
    "select of ints": case(lambda x: x.long()[2] + x.long()[:, 3], ints(4, 4)),
    "select backward": case(lambda g: ATEN.select_backward(g, [3, 5, 4], 1, 2), ints(3, 4)),
    "slice": case(lambda x: x[:, 1:5:2], ints(3, 6)),
    "slice all": case(lambda x: x[:, :6], ints(3, 6)),
    "slice backward": case(lambda g: ATEN.slice_backward(g, [3, 8], 1, 2, 6, 1), ints(3, 4)),
    "slice backward of every second": case(
        lambda g: ATEN.slice_backward(g, [3, 12], 1, 2, 11, 2), ints(3, 5)
    ),
    "slice backward all": case(lambda g: ATEN.slice_backward(g, [3, 4], 1, 0, 9, 1), ints(3, 4)),
    "flip": case(lambda x: x.flip(0), ints(3, 4)),
    "roll": case(lambda x: x.roll(1, 0), ints(3, 4)),
    "pad": case(lambda x: torch.nn.functional.pad(x, (1, 2)), ints(3, 4)),
    "pad 1": case(lambda x: torch.nn.functional.pad(x, (1, -1), value=1.0), ints(3, 4)),
    "tril": case(lambda x: x.tril(1), ints(5, 6)),
    "triu": case(lambda x: x.triu(-1), ints(2, 4, 5)),
    # joining
    "cat": case(lambda x, y: torch.cat([x, y], 1), ints(3, 4), ints(3, 4)),
    "cat to an empty vector": case(lambda x: torch.cat([torch.zeros(0), x], 1), ints(3, 4)),
    "cat uneven": case(lambda x, y: torch.cat([x, y], 1), ints(3, 4), ints(3, 2)),
    "stack": case(lambda x, y: torch.stack([x, y], 1), ints(3, 4), ints(3, 4)),
    "split": case(lambda x: x.split(3, 1), ints(2, 9)),
    "split uneven": case(lambda x: x.split([2, 3], 1), ints(4, 5)),
    "split twice": case(lambda x: [p.relu() for p in torch.cat([x, x], 0).split(2)], ints(2, 3)),
    "unbind": case(lambda x: x.unbind(1), ints(3, 2)),
    "rotate": case(lambda x: torch.cat([-x[..., 2:], x[..., :2]], -1) + x, ints(3, 4)),
    "halves of a packed one": case(
        lambda x, y: torch.cat([x, y], 1)[:, 4:] * 2, ints(2, 4), ints(2, 4)
    ),
    "packed backward": case(lambda g: ATEN.slice_backward(g, [2, 12], 1, 4, 8, 1) * 2, ints(2, 4)),
    # contractions
    "mm": case(torch.mm, ints(4, 6), ints(6, 3)),
    "bmm": case(torch.bmm, ints(3, 4, 2), ints(3, 2, 5)),
    "mv": case(torch.mv, ints(4, 6), ints(6)),
    "dot": case(torch.dot, ints(6), ints(6)),
    "addmm": case(torch.addmm, ints(3), ints(4, 6), ints(6, 3)),
    "addmm scaled": case(
        lambda b, x, w: torch.addmm(b, x, w, beta=2, alpha=3), ints(4, 3), ints(4, 2), ints(2, 3)
    ),
    "baddbmm": case(torch.baddbmm, ints(3, 4, 5), ints(3, 4, 2), ints(3, 2, 5)),
    "linear": case(torch.nn.functional.linear, ints(3, 2, 4), ints(6, 4), ints(6)),
    "einsum": case(lambda x, y: torch.einsum("bsd,bde->bse", x, y), ints(2, 3, 4), ints(2, 4, 3)),
    # linear algebra
    "triangular": case(
        lambda a, b: torch.linalg.solve_triangular(regular(a), b, upper=True, unitriangular=True),
        *(ints(2, 3, 4, 4), ints(3, 4, 5)),
    ),
    "triangular right": case(
        lambda a, b: torch.linalg.solve_triangular(regular(a), b, upper=False, left=False),
        *(ints(4, 4), ints(2, 3, 4)),
        tolerance=1e-12,
    ),
    "solve": case(
        lambda a, b: torch.linalg.solve(regular(a), b),
        *(ints(2, 3, 4, 4), ints(3, 4, 5)),
        tolerance=1e-12,
    ),
    "solve vectors": case(
        lambda a, b: torch.linalg.solve(regular(a), b),
        *(ints(3, 4, 4), ints(3, 4)),
        tolerance=1e-12,
    ),
    "inverse": case(lambda a: regular(a).inverse(), ints(3, 2, 2), tolerance=1e-12),
    "determinant": case(lambda a: torch.linalg.det(a), ints(2, 3, 3, 3), tolerance=1e-12),
    "log determinant": case(lambda a: regular(a).slogdet(), ints(4, 3, 3), tolerance=1e-12),
    "cholesky": case(
        lambda a: torch.linalg.cholesky(regular(a) @ regular(a).mT), ints(4, 3, 3), tolerance=1e-12
    ),
    "qr": case(lambda a: torch.linalg.qr(a), ints(3, 5, 2), tolerance=1e-12),
    "singular values of a constant": case(
        lambda a: a * torch.linalg.svdvals(torch.ones(4, 3, dtype=torch.float64)),
        ints(2, 3),
        tolerance=1e-12,
    ),
    "solve by lu": case(
        lambda a, b: ATEN.linalg_lu_solve(*torch.linalg.lu_factor(regular(a)), b, left=False),
        *(ints(3, 4, 4), ints(2, 1, 5, 4)),
        tolerance=1e-12,
    ),
    "solve by cholesky": case(
        lambda a, b: torch.cholesky_solve(b, regular(a).tril()),
        *(ints(3, 4, 4), ints(2, 3, 4, 5)),
        tolerance=1e-12,
    ),
    "svd": case(lambda a: torch.linalg.svd(a, full_matrices=False), ints(3, 4, 2), tolerance=1e-12),
    "eigenvectors": case(lambda a: torch.linalg.eigh(a + a.mT), ints(3, 3, 3), tolerance=1e-12),
    # reductions
    "sum": case(torch.sum, ints(4, 6)),
    "sum dim": case(lambda x: x.sum(1), ints(4, 6)),
    "sum keep": case(lambda x: x.sum((0, 2), keepdim=True), ints(2, 3, 4)),
    "mean": case(torch.mean, ints(4, 6), tolerance=1e-12),
    "mean dim": case(lambda x: x.mean(-1, keepdim=True), ints(3, 5), tolerance=1e-12),
    "amax": case(lambda x: x.amax(1), ints(4, 6)),
    "all": case(lambda x: (x < 3).all(1), ints(4, 6)),
    "all_of_whole": case(lambda x: (x < 30).all(), ints(4, 6)),
    "any": case(lambda x: (x > 3).any(1, keepdim=True), ints(4, 6)),
    "any_of_bytes": case(lambda x: x.to(torch.uint8).any(), ints(4, 6)),
    "amin": case(lambda x: x.amin((0, 1)), ints(4, 6)),
    "max": case(torch.max, ints(4, 6)),
    "prod": case(lambda x: x.prod(1), ints(3, 4)),
    "var": case(lambda x: x.var(1), ints(3, 5), tolerance=1e-12),
    "std": case(lambda x: x.std(0, correction=0, keepdim=True), ints(4, 3), tolerance=1e-12),
    "norm": case(lambda x: torch.linalg.vector_norm(x), ints(4, 3), tolerance=1e-12),
    "norm 3": case(lambda x: torch.linalg.vector_norm(x, 3, 1), ints(4, 3), tolerance=1e-12),
    "norm inf": case(lambda x: torch.linalg.vector_norm(x, float("inf")), ints(4, 3)),
    "logsumexp": case(lambda x: torch.logsumexp(x, 1), ints(4, 3), tolerance=1e-12),
    "histogram": case(lambda x: torch.histc(x, 5, -2, 3), ints(4, 3)),
    "histogram between extremes": case(lambda x: torch.histc(x, 5), ints(4, 3)),
    "logsumexp of infinities": case(
        lambda x: torch.logsumexp(torch.where(x > 1, math.inf, -math.inf), 1), ints(6, 4)
    ),
    "var of complex numbers": case(
        lambda x: x.var(1), torch.complex(ints(4, 5), ints(5, 4).t()), tolerance=1e-12
    ),
    "norm of complex numbers": case(
        lambda x: torch.linalg.vector_norm(x, dim=1),
        torch.complex(ints(4, 5), ints(5, 4).t()),
        tolerance=1e-12,
    ),
    "norm inf of complex numbers": case(
        lambda x: torch.linalg.vector_norm(x, math.inf, 1),
        torch.complex(ints(4, 5), ints(5, 4).t()),
        tolerance=1e-12,
    ),
    "argmax": case(lambda x: x.argmax(1), ints(4, 5)),
    "max dim": case(lambda x: x.max(0), ints(4, 5)),
    "cumsum": case(lambda x: x.cumsum(1), ints(4, 5)),
    "sort": case(lambda x: x.sort(dim=1, stable=True)[0], ints(4, 5)),
    "topk": case(lambda x: x.topk(2, 1)[0], ints(4, 5)),
    # softmax and losses
    "softmax": case(lambda x: x.softmax(-1), ints(3, 5), tolerance=1e-12),
    "softmax middle": case(lambda x: x.softmax(1), ints(2, 4, 3), tolerance=1e-12),
    "log softmax": case(lambda x: x.log_softmax(-1), ints(3, 5), tolerance=1e-12),
    "softmax backward": case(
        lambda g, y: ATEN._softmax_backward_data(g, y, -1, torch.float64),
        *(ints(3, 5), ints(3, 5)),
        tolerance=1e-12,
    ),
    "log softmax backward": case(
        lambda g, y: ATEN._log_softmax_backward_data(g, y, -1, torch.float64),
        *(ints(3, 5), ints(3, 5)),
        tolerance=1e-12,
    ),
    "cross entropy": case(
        lambda x, t: torch.nn.functional.cross_entropy(x, t, ignore_index=3),
        *(ints(5, 7), indices(7, 5)),
        tolerance=1e-12,
    ),
    **{
        f"nll {name}": case(
            nll(r),
            *(ints(5, 4), indices(4, 5), ints(4).abs() + 1),
            tolerance=1e-12,
        )
        for r, name in enumerate(("none", "mean", "sum"))
    },
    "ctc": case(ctc, ints(6, 4, 5), *ROWS_OF_CTC, tolerance=1e-12),
    "ctc backward": case(ctc_backward, ints(4), ints(6, 4, 5), *ROWS_OF_CTC, tolerance=1e-12),
    "nll of one": case(
        lambda x, t: ATEN.nll_loss_forward(x, t, None, 1, -100), ints(4), indices(4)
    ),
    **{
        f"nll backward {name}": case(
            nll_backward(r),
            *((ints(5) if r == 0 else ints()), ints(5, 4), indices(4, 5), ints(4).abs() + 1),
            tolerance=1e-12,
        )
        for r, name in enumerate(("none", "mean", "sum"))
    },
    # normalizations
    "layer norm": case(
        lambda x, w, b: ATEN.native_layer_norm(x, [4], w, b, 1e-5),
        *(ints(3, 2, 4), ints(4), ints(4)),
        tolerance=1e-12,
    ),
    "layer norm backward": case(
        lambda g, x, w, b: ATEN.native_layer_norm_backward(
            *(g, x, [4], x.mean(-1, keepdim=True), x.amax(-1, keepdim=True), w, b),
            [True, True, True],
        ),
        *(ints(3, 2, 4), ints(3, 2, 4), ints(4), ints(4)),
        tolerance=1e-11,
    ),
    "rms norm": case(
        lambda x, w: ATEN._fused_rms_norm(x, [4], w, 1e-5), ints(3, 4), ints(4), tolerance=1e-12
    ),
    "group norm": case(
        lambda x, w, b: ATEN.native_group_norm(x, w, b, 4, 2, 6, 2, 1e-5),
        *(ints(4, 2, 6), ints(2), ints(2)),
        tolerance=1e-12,
    ),
    # attention
    "attention": case(
        lambda q, k, v: ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True),
        *(ints(2, 4, 3, 8), ints(2, 4, 3, 8), ints(2, 4, 3, 8)),
        tolerance=1e-12,
    ),
    "attention of groups": case(
        lambda q, k, v, m: ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=m),
        *(ints(2, 4, 3, 8), ints(2, 2, 3, 8), ints(2, 2, 3, 8), ints(2, 1, 3, 3)),
        tolerance=1e-12,
    ),
    "attention with dropout": case(
        lambda q, k, v: dropout_attention(q, k, v, causal=True)[0],
        *(ints(2, 6, 5, 2), ints(2, 3, 5, 2), ints(2, 3, 5, 2)),
        tolerance=1e-9,
    ),
    "attention with dropout backward": case(
        dropout_attention_backward,
        *(ints(2, 6, 5, 2), ints(2, 6, 5, 2), ints(2, 3, 5, 2), ints(2, 3, 5, 2)),
        tolerance=1e-9,
    ),
    "attention with dropout and a mask backward": case(
        dropout_attention_backward,
        *(ints(2, 6, 5, 2), ints(2, 6, 5, 2), ints(2, 3, 7, 2), ints(2, 3, 7, 2), ints(6, 1, 7)),
        tolerance=1e-9,
    ),
    "attention backward": case(
        lambda g, q, k, v: attention_backward(g, q, k, v),
        *(ints(2, 4, 3, 8), ints(2, 4, 3, 8), ints(2, 4, 3, 8), ints(2, 4, 3, 8)),
        tolerance=1e-11,
    ),
    # convolutions
    "convolution": case(torch.conv2d, ints(3, 2, 4, 4), ints(6, 2, 3, 3), ints(6)),
    "convolution 1d": case(lambda x, w: torch.conv1d(x, w, stride=2), ints(3, 4, 7), ints(2, 4, 3)),
    "convolution of groups": case(
        lambda x, w, b: torch.conv1d(x, w, b, groups=4), ints(2, 8, 5), ints(4, 2, 3), ints(4)
    ),
    "convolution backward": case(
        lambda g, x, w: ATEN.convolution_backward(
            *(g, x, w, [6], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True])
        ),
        *(ints(3, 6, 2, 2), ints(3, 2, 4, 4), ints(6, 2, 3, 3)),
    ),
    "backward of a convolution of groups": case(
        lambda g, x, w: ATEN.convolution_backward(
            *(g, x, w, [4], [1], [0], [1], False, [0], 4, [True, True, True])
        ),
        *(ints(2, 4, 3), ints(2, 8, 5), ints(4, 2, 3)),
    ),
    "backward of a convolution of each channel": case(
        lambda g, x, w: ATEN.convolution_backward(
            *(g, x, w, [0], [1], [2], [1], False, [0], 6, [True, True, False])
        ),
        *(ints(2, 6, 7), ints(2, 6, 5), ints(6, 1, 3)),
    ),
    "transposed convolution of groups": case(
        lambda x, w: torch.conv_transpose1d(x, w, groups=4), ints(2, 8, 3), ints(8, 2, 3)
    ),
    "backward of a transposed convolution of groups": case(
        lambda g, x, w: ATEN.convolution_backward(
            *(g, x, w, [8], [1], [0], [1], True, [0], 4, [True, True, True])
        ),
        *(ints(2, 8, 5), ints(2, 8, 3), ints(8, 2, 3)),
    ),
    "average pooling": case(lambda x: torch.nn.functional.avg_pool2d(x, 2), ints(3, 2, 4, 4)),
    "maximal pooling": case(
        lambda x: torch.nn.functional.max_pool2d(x, 2, return_indices=True), ints(3, 2, 4, 4)
    ),
    # indices
    "index by counting": case(
        lambda x, i: x[torch.arange(4)[:, None, None], i], ints(4, 5), indices(5, 2, 3)
    ),
    "products of rows and heads": case(
        lambda x: (x.view(12, 2, 2) @ x.view(12, 2, 2)).view(4, 3, 2, 2), ints(4, 3, 2, 2)
    ),
    "embedding": case(ATEN.embedding.default, ints(7, 3), indices(7, 4, 2)),
    "embedding backward": case(
        lambda g, i: ATEN.embedding_dense_backward(g, i, 7, 2, False),
        ints(4, 2, 3),
        indices(7, 4, 2),
    ),
    "embedding gradient": case(
        lambda g, i, w: ATEN.embedding_dense_backward(g, i, 7, -1, False) + w,
        *(ints(4, 2, 3), indices(7, 4, 2), ints(7, 3)),
    ),
    "embedding gradient by frequency": case(
        lambda g, i: ATEN.embedding_dense_backward(g, i, 7, 2, True),
        *(ints(4, 2, 3), OF_BORDERS),
        tolerance=1e-12,
    ),
    "embedding rows by frequency": case(
        lambda g, i, w: ATEN.embedding_dense_backward(g, i, 7, -1, True) + w,
        *(ints(4, 2, 3), OF_BORDERS, ints(7, 3)),
        tolerance=1e-12,
    ),
    "index": case(lambda x, i: x[:, i], ints(3, 4, 2), indices(4, 5)),
    "index two": case(lambda x, i, j: x[i, :, j], ints(3, 4, 2), indices(3, 2, 1), indices(2, 3)),
    "index rows": case(lambda x, i: x[torch.arange(4), i], ints(4, 5, 2), indices(5, 4)),
    "index put": case(
        lambda x, i, v: ATEN.index_put(x, [i], v, True), ints(4, 3), indices(4, 5), ints(5, 3)
    ),
    "index put rows": case(
        lambda g, i: ATEN.index_put(g.new_zeros(4, 5, 2), [torch.arange(4), i], g, True),
        *(ints(4, 2), indices(5, 4)),
    ),
    "put by a mask": case(
        lambda x, m, v: ATEN.index_put(x, [m > 0], v), ints(4, 5, 2), ints(4, 5), ints(1, 2)
    ),
    "put by a mask of columns": case(
        lambda x, m: _with_zeros(x.clone(), m > 0), ints(4, 5, 2), ints(5)
    ),
    "add by a mask": case(
        lambda x, m, v: ATEN.index_put(x, [m > 0], v, True), ints(4, 3), ints(4), ints(3)
    ),
    "gather": case(lambda x, i: x.gather(1, i), ints(4, 5), indices(5, 4, 2)),
    "gather of int32": case(lambda x, i: x.int().gather(1, i), ints(4, 5), indices(5, 4, 2)),
    "gather of bools": case(lambda x, i: (x > 0).gather(1, i), ints(4, 5), indices(5, 4, 2)),
    "gather part": case(lambda x, i: x.gather(1, i), ints(4, 5), indices(5, 3, 2)),
    "scatter add": case(
        lambda x, i, v: x.scatter_add(1, i, v), ints(4, 5), indices(5, 4, 2), ints(4, 2)
    ),
    "scatter value": case(lambda x, i: x.scatter(1, i, 1.0), ints(4, 5), indices(5, 4, 2)),
    "index of bools": case(lambda x, i: (x > 0)[:, i], ints(3, 5), indices(5, 4)),
    "index from the end": case(lambda x, i: x[i - 4], ints(4, 3), indices(8, 5)),
    "index two from the end": case(
        lambda x, i, j: x[:, i - 3, j - 2], ints(2, 5, 4), indices(6, 3), indices(4, 2, 3)
    ),
    "put two": case(
        lambda x, i, j, v: ATEN.index_put(x, [i, None, j - 2], v, True),
        *(ints(5, 2, 4), indices(5, 3), indices(4, 2, 3), ints(2, 3, 2)),
    ),
    "put rows in their place": case(
        lambda x, v: ATEN.index_put(x, [torch.tensor([3, -4, 1])], v), ints(5, 3), ints(3, 3)
    ),
    "add to zeros": case(
        lambda i, v: torch.zeros(4, 3, dtype=v.dtype).index_add(0, i, v, alpha=2),
        *(indices(4, 5), ints(5, 3)),
    ),
    "put into zeros": case(
        lambda i, v: ATEN.index_put(v.new_zeros(4, 3), [i], v, True), indices(4, 5), ints(5, 3)
    ),
    "scatter into zeros": case(
        lambda i, v: torch.zeros_like(v).scatter_add(1, i, v), indices(5, 4, 5), ints(4, 5)
    ),
    "add to what were zeros": case(
        lambda i, v: _with_ones(v.new_zeros(4, 3)).index_add(0, i, v), indices(4, 5), ints(5, 3)
    ),
    "scatter source": case(
        lambda x, v: x.scatter(1, torch.tensor([[3, 0]]).expand(4, 2), v), ints(4, 5), ints(4, 2)
    ),
    "scatter of a part": case(
        lambda x, i, v: x.scatter_add(0, i, v), ints(5, 4), indices(5, 2, 3), ints(4, 3)
    ),
    "take along": case(lambda x, i: x.take_along_dim(i, 1), ints(3, 5), indices(5, 1, 4)),
    "index select": case(lambda x, i: x.index_select(1, i), ints(3, 4), indices(4, 5)),
    "index add": case(lambda x, i, v: x.index_add(0, i, v), ints(4, 3), indices(4, 5), ints(5, 3)),
    # random draws
    "dropout": case(lambda x: ATEN.native_dropout(x, 0.5, True), ints(4, 3)),
    "bernoulli": case(lambda x: x * torch.empty_like(x).bernoulli_(0.5), ints(4, 3)),
    "uniform": case(lambda x: x + torch.empty_like(x).uniform_(), ints(4, 3)),
    "rand like": case(lambda x: x * torch.rand_like(x), ints(4, 3), tolerance=1e-12),
    "randn": case(
        lambda x: x * torch.randn(4, 3, dtype=torch.float64), ints(4, 3), tolerance=1e-12
    ),
}
