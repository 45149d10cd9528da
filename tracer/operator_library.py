"""The library of torch that cg's own operators are in, and how one of them is defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

_LIBRARY: Any = torch.library.Library("cg", "FRAGMENT")  # type: ignore[no-untyped-call]


def defined(
    schema: str,
    kernel: Callable[..., Any] | None,
    fake: Callable[..., Any],
    *,
    flops: Callable[..., int] | None = None,
    cuda: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    """Define an operator of the namespace `cg`.

    Args:
        schema: its name, arguments and results, as torch writes them.
        kernel: computes it on any device, below autograd; None if it stands in graphs alone.
        fake: gives its results for fake tensors.
        flops: its floating-point operations, of the shapes of its arguments.
        cuda: the kernel on CUDA devices, in the place of `kernel`.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    if kernel is not None:
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    if cuda is not None:
        _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"cg::{name}", fake, lib=_LIBRARY)
    packet = getattr(torch.ops.cg, name)
    if flops is not None:
        register_flop_formula(packet)(flops)
    operator: torch._ops.OpOverload = packet.default
    return operator


def attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Two operations for each multiply-add of all pairs, as torch counts its kernels."""
    batch, heads, rows, width = query
    return 2 * int(batch * heads * rows * key[2] * (width + value[3]))


def attention_backward_flops(query: Any, key: Any, value: Any) -> int:
    """Scores again, and two products for each of the forward's."""
    batch, heads, rows, width = query
    return 2 * int(batch * heads * rows * key[2] * (3 * width + 2 * value[3]))
