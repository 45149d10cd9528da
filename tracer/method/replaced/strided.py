"""Have `as_strided` count from the first element of its tensor.

Its offset counts from the beginning of the memory that the tensor lies in. A step may pass a tensor
that lies elsewhere than the one it was traced with, and so may a compiler between its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...values.operators import argument_of

_ATEN = torch.ops.aten
_PLAIN = _ATEN.as_strided.default
_OTHERS = frozenset(
    {
        *(_ATEN.as_strided_.default, _ATEN.as_strided_copy.default),
        _ATEN.as_strided_scatter.default,
    }
)
WITH_OFFSET: frozenset[Any] = _OTHERS | {_PLAIN}
"""The operators that may be given an offset."""
REMEDY = (
    "leave the offset out, and begin with the element that it means: of a contiguous x take "
    "x.flatten()[offset:].as_strided(size, stride), and write to such a view of x.clone() in place "
    "of as_strided_scatter"
)

Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Calls an operator with arguments and keyword arguments."""


class OffsetError(Exception):
    """The memory that an offset counts from is not known; the text is the reason."""


def from_first_element(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None, call: Call
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """An operator of `WITH_OFFSET` and its arguments, without an offset that counts from memory.

    Args:
        name: of the value in whose memory its tensor lies, if that comes from elsewhere.
        call: calls the operators that leave out elements.

    Raises:
        OffsetError: the memory of the tensor is not known, or nothing but the offset says which
            elements are meant.
    """
    offset = argument_of(func, args, kwargs, "storage_offset")
    if offset is None:
        return func, args, kwargs
    if name is not None:
        raise OffsetError(
            f"an offset of as_strided counts from the beginning of the memory of {name}, which "
            "may be part of a larger tensor's when the step runs"
        )
    tensor, size, stride = (argument_of(func, args, kwargs, n) for n in ("self", "size", "stride"))
    ahead = offset - tensor.storage_offset()
    if ahead < 0 or func is not _PLAIN:
        raise OffsetError("an offset of as_strided counts from the beginning of memory")
    if ahead > 0:
        last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        count = ahead + (last + 1 if 0 not in size else 0)
        elements = call(_PLAIN, (tensor, [count], [1]), {})
        tensor = call(_ATEN.slice.Tensor, (elements, 0, ahead), {})
    return func, (tensor, size, stride), {}
