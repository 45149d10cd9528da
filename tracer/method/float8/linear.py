"""A linear layer in float8: forward, gradient of the input, gradient of the weight.

With `x` `[m, k]`, `w` `[n, k]` and the gradient `g` `[m, n]` of the result, the three products are
`x @ w.T`, `g @ w` and `g.T @ x`. Each contracts another dimension. So scales by tensor serve two
products, and scales by row are computed for each product anew. `torchao/float8/float8_linear.py`
does the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...function_runs import Run
from ...values.float8_layers import Float8Recipe, Float8Use
from ...values.operators import OperatorFunction
from ..purity.function_log import OfGraph
from .formula import product, quantised, scales, turned

_E4M3 = torch.float8_e4m3fn

_Scaled = tuple[Tensor, Tensor]
"""A float8 matrix and its scales."""


class _TensorwiseProducts(OperatorFunction):
    """`x @ w.T` with one scale for each tensor; the backward uses the casts of the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        left, right = _by_tensor(x, _E4M3), _by_tensor(w, _E4M3)
        ctx.save_for_backward(*left, *right)
        ctx.weight_dtype = w.dtype
        return product(left, right, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, w, w_scale = ctx.saved_tensors
        recipe = Float8Recipe.TENSORWISE
        cast, scale = _by_tensor(gradient, recipe.gradient)
        to_x, to_w = ctx.needs_input_grad
        fast = recipe.fast_gradients
        return (
            product((cast, scale), (turned(w), w_scale), gradient.dtype, fast) if to_x else None,
            product((turned(cast), scale), (turned(x), x_scale), ctx.weight_dtype, fast)
            if to_w
            else None,
        )


class _RowwiseProducts(OperatorFunction):
    """`x @ w.T` with a scale for each row of what is contracted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return product(_by_row(x, _E4M3), _by_row(w, _E4M3), x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        recipe = Float8Recipe.ROWWISE
        kind, fast = recipe.gradient, recipe.fast_gradients
        to_x, to_w = ctx.needs_input_grad
        return (
            product(_by_row(gradient, kind), _by_row(w.t(), _E4M3), gradient.dtype, fast)
            if to_x
            else None,
            product(_by_row(gradient.t(), kind), _by_row(x.t(), _E4M3), w.dtype, fast)
            if to_w
            else None,
        )


def _by_tensor(value: Tensor, dtype: torch.dtype) -> _Scaled:
    scale = scales(value, dtype, by_row=False)
    return quantised(value, scale, dtype), scale


def _by_row(value: Tensor, dtype: torch.dtype) -> _Scaled:
    scale = scales(value, dtype, by_row=True)
    return quantised(value, scale, dtype).contiguous(), scale


class Float8Linear(OfGraph):
    """`torch.nn.functional.linear` in float8, as a function that a log of functions may hold."""

    def __call__(
        self, recipe: Float8Recipe, input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Compute the layer.

        Args:
            recipe: how tensors are scaled.
            input: `[..., k]`. Under autocast it is cast first, as the layer's own product does.
            weight: `[n, k]`.
            bias: `[n]`; it is added in the result's type, and its gradient is not of float8.

        Returns:
            `[..., n]`, of the type of `input`.
        """
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        elif input.dtype != weight.dtype:
            raise RuntimeError(
                f"expected input and weight to have one dtype, but got {input.dtype} and "
                f"{weight.dtype}"
            )
        rows = input.reshape(-1, input.shape[-1])
        by_row = recipe is Float8Recipe.ROWWISE
        products = _RowwiseProducts if by_row else _TensorwiseProducts
        result: Tensor = products.apply(rows, weight)  # type: ignore[no-untyped-call]
        result = result.view(*input.shape[:-1], weight.shape[0])
        return result if bias is None else result + bias.to(result.dtype)


FLOAT8_LINEAR = Float8Linear()


def in_float8(
    run: Run, weights: Mapping[int, tuple[str, Float8Recipe]], use: Float8Use | None
) -> Run:
    """Run torch functions, and linear layers of some weights in float8.

    Args:
        run: runs a function.
        weights: the path and the recipe of each such weight, by the id of the tensor.
        use: notes which of them are multiplied.
    """
    if use is None:
        return run

    def substituted(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if function is nn.functional.linear:
            weight = args[1] if len(args) > 1 else kwargs.get("weight")
            if id(weight) in weights:
                path, recipe = weights[id(weight)]
                use.multiplied.add(path)
                return run(FLOAT8_LINEAR, (recipe, *args), kwargs)
        return run(function, args, kwargs)

    return substituted
