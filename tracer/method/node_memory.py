"""Which nodes of a graph share memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ..values.operators import storage_key


def memory_of(node: fx.Node) -> int | None:
    """A key for the memory of a node's tensor; None if it is no tensor or has no storage."""
    value = node.meta.get("val")
    return storage_key(value) if isinstance(value, torch.Tensor) else None


def sharing(
    values: Sequence[fx.Node], inputs: Sequence[fx.Node], first: int = 0
) -> tuple[tuple[int, int], ...]:
    """The pairs (value, input) that share memory in the joint graph; values count from `first`."""
    memory: dict[int | None, list[int]] = {}
    for i, node in enumerate(inputs):
        memory.setdefault(memory_of(node), []).append(i)
    memory.pop(None, None)
    numbered = enumerate(values, first)
    return tuple((i, j) for i, node in numbered for j in memory.get(memory_of(node), ()))


def state_references(values: Sequence[fx.Node], state: set[int | None]) -> tuple[int, ...]:
    """The indices of values that share memory with the state; `state` has the state's memory."""
    return tuple(i for i, node in enumerate(values) if memory_of(node) in state)
