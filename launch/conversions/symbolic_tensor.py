"""Tensors without numbers, on which a conversion runs: they record where numbers come from.

An operation that only rearranges numbers gives such a tensor again. Any other is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .composition import Composition, joined

_ATEN = torch.ops.aten


class SymbolicTensor(torch.Tensor):
    """A tensor whose numbers are those of a composition.

    Attributes:
        composition: says which stored tensors they are in.
    """

    composition: Composition

    @staticmethod
    def __new__(cls, composition: Composition, dtype: torch.dtype) -> SymbolicTensor:
        """A tensor on the host, for the type of whose numbers conversions may ask."""
        tensor = torch.Tensor._make_wrapper_subclass(cls, composition.shape, dtype=dtype)
        tensor.composition = composition
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        rule = _RULES.get(func)
        if rule is None or kwargs:
            raise NotImplementedError(f"it calls {func}, and cg follows none but rearrangements")
        first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        dtype = first.dtype
        result = rule(*_compositions(args))
        if isinstance(result, Composition):
            return SymbolicTensor(result, dtype)
        return [SymbolicTensor(composition, dtype) for composition in result]


def _compositions(value: Any) -> Any:
    if isinstance(value, SymbolicTensor):
        return value.composition
    if isinstance(value, list | tuple):
        return [_compositions(item) for item in value]
    return value


def _cat(tensors: Sequence[Composition], dim: int = 0) -> Composition:
    return joined(tensors, dim % len(tensors[0].shape))


def _stack(tensors: Sequence[Composition], dim: int = 0) -> Composition:
    at = dim % (len(tensors[0].shape) + 1)
    return joined([tensor.unsqueezed(at) for tensor in tensors], at)


def _split(tensor: Composition, size: int | Sequence[int], dim: int = 0) -> list[Composition]:
    at = dim % len(tensor.shape)
    whole = tensor.shape[at]
    sizes = size
    if isinstance(sizes, int):
        sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)]
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [tensor.narrowed(at, end - n, end) for end, n in zip(ends, sizes, strict=True)]


def _unbind(tensor: Composition, dim: int = 0) -> list[Composition]:
    at = dim % len(tensor.shape)
    return [_select(tensor, at, index) for index in range(tensor.shape[at])]


def _select(tensor: Composition, dim: int, index: int) -> Composition:
    at = dim % len(tensor.shape)
    begin = index % tensor.shape[at]
    return tensor.narrowed(at, begin, begin + 1).squeezed(at)


def _slice(
    tensor: Composition,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Composition:
    if step != 1:
        raise NotImplementedError(f"it takes one index of {step}")
    at = dim % len(tensor.shape)
    begin, stop, _ = slice(start, end).indices(tensor.shape[at])
    return tensor.narrowed(at, begin, stop)


def _transpose(tensor: Composition, dim0: int, dim1: int) -> Composition:
    order = list(range(len(tensor.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return tensor.permuted(order)


def _t(tensor: Composition) -> Composition:
    return _transpose(tensor, 0, 1) if len(tensor.shape) == 2 else tensor


def _permute(tensor: Composition, dims: Sequence[int]) -> Composition:
    return tensor.permuted([dim % len(tensor.shape) for dim in dims])


def _squeeze(tensor: Composition, dim: int) -> Composition:
    at = dim % len(tensor.shape)
    return tensor.squeezed(at) if tensor.shape[at] == 1 else tensor


def _unsqueeze(tensor: Composition, dim: int) -> Composition:
    return tensor.unsqueezed(dim % (len(tensor.shape) + 1))


def _view(tensor: Composition, shape: Sequence[int]) -> Composition:
    known = math.prod(size for size in shape if size != -1)
    count = math.prod(tensor.shape)
    return tensor.viewed([count // known if size == -1 else size for size in shape])


def _same(tensor: Composition) -> Composition:
    return tensor


_RULES: dict[Any, Callable[..., Composition | list[Composition]]] = {
    _ATEN.cat.default: _cat,
    _ATEN.stack.default: _stack,
    _ATEN.split.Tensor: _split,
    _ATEN.split_with_sizes.default: _split,
    _ATEN.unbind.int: _unbind,
    _ATEN.select.int: _select,
    _ATEN.slice.Tensor: _slice,
    _ATEN.transpose.int: _transpose,
    _ATEN.t.default: _t,
    _ATEN.permute.default: _permute,
    _ATEN.squeeze.dim: _squeeze,
    _ATEN.unsqueeze.default: _unsqueeze,
    _ATEN.view.default: _view,
    _ATEN._unsafe_view.default: _view,
    _ATEN.clone.default: _same,
    _ATEN.detach.default: _same,
    _ATEN.alias.default: _same,
}
"""What operations of torch do to compositions."""
