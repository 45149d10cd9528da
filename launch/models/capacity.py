"""The choices of tokens that experts take, if each of them takes so many at most."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...tracer.record.intrinsics.asked_layouts import layout
from ...tracer.values.plan import whole


def expert_capacity(ids: Tensor, experts: int, capacity: float) -> Tensor:
    """Say which choices of tokens their experts take, if each takes a limited number of them.

    An expert takes at most `capacity * tokens * choices / experts` choices: those of the first
    tokens, and of a token the first choices. On a mesh tokens are those of all ranks, so the result
    does not depend on the mesh. Ranks that share the tokens gather `ids` for it. Nothing is dropped
    by itself: multiply shares by the result, and count what is left out. The rule is that of GShard
    (Lepikhin et al., 2020, https://arxiv.org/abs/2006.16668).

    ```python
    shares, ids = self.router(x).softmax(-1).topk(2)
    taken = cg.expert_capacity(ids, experts=8, capacity=1.25)
    shares, dropped = shares * taken, (~taken).sum()
    ```

    Args:
        ids: integers `[tokens, choices]`, from 0 to `experts - 1`.
        experts: how many there are.
        capacity: a positive number; at 1 there is room for all choices if experts get
            equally many.

    Returns:
        bool `[tokens, choices]`, on the device of `ids`; on a mesh, the same on all ranks.

    Raises:
        ValueError: `ids` are no such integers, or a number is not positive.
    """
    if ids.dim() != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(
            "cg.expert_capacity takes integers [tokens, choices], not "
            f"{ids.dtype} {list(ids.shape)}"
        )
    if experts < 1 or not capacity > 0:
        raise ValueError(
            f"cg.expert_capacity takes positive numbers, not experts={experts}, capacity={capacity}"
        )
    room = math.floor(capacity * ids.numel() / experts)
    chosen, order = layout(ids, whole).reshape(-1).sort(stable=True)
    first = torch.searchsorted(chosen, chosen, right=False)
    place = torch.arange(ids.numel(), device=ids.device) - first
    taken = torch.zeros_like(chosen, dtype=torch.bool).scatter(0, order, place < room)
    return taken.view(ids.shape)
