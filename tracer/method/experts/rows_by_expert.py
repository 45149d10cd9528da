"""Rows in the order of their experts: the order, and the ops that take rows there and back.

A rank that has some of the experts computes their rows alone. On a host the order ends with them. A
device would have to tell the host how many they are, so there rows of experts elsewhere come last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...checked_ids import checked

_LIBRARY = torch.library.Library("cg", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "own_rows(Tensor ids, SymInt first, SymInt experts, SymInt? total=None, int[]? place=None, "
    "bool all_rows=False) -> (Tensor, Tensor)"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "first_rows(Tensor(a) rows, Tensor order) -> Tensor(a)"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "with_room(Tensor rows, Tensor order, SymInt count) -> Tensor"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "rows_back(Tensor rows, Tensor order, Tensor ends, SymInt count) -> Tensor"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "sums_by_token(Tensor rows, Tensor tokens, Tensor ends, SymInt count) -> Tensor"
)


def own_rows(
    ids: Tensor,
    first: int,
    experts: int,
    total: int | None = None,
    place: Sequence[int] | None = None,
    all_rows: bool = False,
) -> tuple[Tensor, Tensor]:
    """The order that sorts a rank's rows by expert, and where each expert's rows end, as int32.

    Args:
        ids: integers `[tokens, choices]`.
        first, experts: the rank's first expert, and how many it has.
        total: how many experts all ranks have; None: ids are not checked.
        place: the indices of the first of these ids among those of all ranks, for errors.
        all_rows: whether rows of experts elsewhere come last, also on a host.

    Raises:
        IndexError: an id is no index of one of `total` experts.
    """
    if ids.device.type != "cpu":
        if total is not None:
            ids = checked(ids, total, None, "expert_linear", place)
        return all_by_expert(ids - first, experts, partial=True)
    ranked, order = ids.reshape(-1).to(torch.int64).sort(stable=True)
    least, stop = (first - 1, first + experts) if total is None else (-1, total)
    counts = torch.searchsorted(ranked, _numbers(least, stop), right=True).tolist()
    if total is not None and (counts[0] or counts[-1] < len(ranked)):
        checked(ids, total, None, "expert_linear", place)
    before = first - 1 - least
    start, end = counts[before], counts[before + experts]
    own = order[start:end]
    if all_rows:
        own = torch.cat([own, order[:start], order[end:]])
    ends = [count - start for count in counts[before + 1 : before + experts + 1]]
    return own, torch.tensor(ends, dtype=torch.int32, device="cpu")


@functools.lru_cache(maxsize=256)
def _numbers(first: int, stop: int) -> Tensor:
    """The integers of a range, which nobody writes to."""
    return torch.arange(first, stop, device="cpu")


def all_by_expert(ids: Tensor, experts: int, partial: bool) -> tuple[Tensor, Tensor]:
    """The same for all rows, with those of experts elsewhere last.

    Args:
        ids: integers `[tokens, choices]`.
        experts: how many there are.
        partial: whether other ids are of experts elsewhere.

    Raises:
        IndexError: an id is of no expert, where none are elsewhere.
    """
    flat = ids.reshape(-1)
    is_here = (flat >= 0) & (flat < experts)
    if partial:
        flat = torch.where(is_here, flat, experts)
    elif flat.device.type != "cpu":
        torch._assert_async(is_here.all())  # the host does not wait for the device
    elif not is_here.all():
        raise IndexError(
            f"expert_linear: {int(flat[~is_here][0])} is the index of no expert: there are "
            f"{experts}, 0 to {experts - 1}; correct the ids"
        )
    ranked, order = flat.to(torch.int32).sort(stable=True)
    numbers = torch.arange(experts, device=ids.device, dtype=torch.int32)
    return order, torch.searchsorted(ranked, numbers, right=True, out_int32=True)


def first_rows(rows: Tensor, order: Tensor) -> Tensor:
    """The rows that an order has, of those that are sorted by it."""
    return rows[: len(order)]


def with_room(rows: Tensor, order: Tensor, count: int) -> Tensor:
    """The rows that an order has, as the first of `count` rows; the others are not defined."""
    result = rows.new_empty(count, *rows.shape[1:])
    result[: len(order)] = rows
    return result


def rows_back(rows: Tensor, order: Tensor, ends: Tensor, count: int) -> Tensor:
    """Rows that are sorted by expert, at their places among `count`; all others are zeros."""
    if rows.device.type == "cpu":
        rows, order = _sorted_rows(rows, order, ends)
    else:
        is_here = torch.arange(len(rows), device=rows.device) < ends[-1]
        rows = torch.where(is_here.view(-1, *(1,) * (rows.dim() - 1)), rows, 0)
    make = rows.new_empty if len(rows) == count else rows.new_zeros
    return make(count, *rows.shape[1:]).index_copy_(0, order, rows)


def sums_by_token(rows: Tensor, tokens: Tensor, ends: Tensor, count: int) -> Tensor:
    """The sum of each token's rows, which are sorted by expert, without those of experts elsewhere.

    A half is added up in float32, and rounded once.

    Args:
        rows: of a floating type, in memory of the host.
        tokens: the token of each row.
        ends: as `own_rows` gives them.
        count: how many tokens there are.
    """
    rows, tokens = _sorted_rows(rows, tokens, ends)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    sums = rows.new_zeros(count, *rows.shape[1:], dtype=dtype)
    sums.index_add_(0, tokens, rows.to(dtype))
    return sums.to(rows.dtype)


def _sorted_rows(rows: Tensor, order: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and their places without those of experts elsewhere, which only `all_rows` leaves."""
    last = int(ends[-1]) if len(ends) else 0
    return (rows, order) if last == len(order) else (rows[:last], order[:last])


torch.library.register_fake(
    "cg::own_rows",
    lambda ids, first, experts, total=None, place=None, all_rows=False: (
        ids.new_empty(ids.numel(), dtype=torch.int64),
        ids.new_empty(experts, dtype=torch.int32),
    ),
    lib=_LIBRARY,
)
torch.library.register_fake("cg::first_rows", first_rows, lib=_LIBRARY)
torch.library.register_fake(
    "cg::with_room", lambda rows, order, count: rows.new_empty(count, *rows.shape[1:]), lib=_LIBRARY
)
torch.library.register_fake(
    "cg::rows_back",
    lambda rows, order, ends, count: rows.new_empty(count, *rows.shape[1:]),
    lib=_LIBRARY,
)
torch.library.register_fake(
    "cg::sums_by_token",
    lambda rows, tokens, ends, count: rows.new_empty(count, *rows.shape[1:]),
    lib=_LIBRARY,
)

OWN_ROWS = torch.ops.cg.own_rows.default
FIRST_ROWS = torch.ops.cg.first_rows.default
WITH_ROOM = torch.ops.cg.with_room.default
ROWS_BACK = torch.ops.cg.rows_back.default
SUMS_BY_TOKEN = torch.ops.cg.sums_by_token.default
KERNELS: Mapping[object, Callable[..., Any]] = {
    OWN_ROWS: own_rows,
    FIRST_ROWS: first_rows,
    WITH_ROOM: with_room,
    ROWS_BACK: rows_back,
    SUMS_BY_TOKEN: sums_by_token,
}
"""The operators, with the functions that compute them."""
for _operator, _kernel in KERNELS.items():
    _LIBRARY.impl(_operator, _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
