"""Undo what a step has done to actors, by copies of all their state, optimizers included."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

from ...values.actor_state import collect
from ...values.gradient_buckets import set_gradient
from ...values.heap.snapshot import Snapshot
from ...values.operators import storage_key

_Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""The memory of a tensor as bytes, or a tensor without plain memory; and a copy of it."""


class Undo:
    """Remembers the state of actors at one moment, and can restore it.

    The state is what tracing sees of the actors' attributes: tensors and their gradients, lists,
    dicts, sets and plain objects; optimizers, schedulers of learning rates and scalers; and
    torch's default generator. Files and the contents of other objects are not restored.

    Args:
        actors: instances that live in this process.
    """

    def __init__(self, actors: Iterable[Any]) -> None:
        self._actors = tuple(actors)
        self._copies: dict[int, _Pair] = {}
        self._containers: list[Snapshot] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._generator = torch.get_rng_state()

    def remember(self) -> None:
        """Copy the current state; the copies of the last time are reused."""
        before, self._copies = self._copies, {}
        self._gradients, self._containers = [], []
        self._generator = torch.get_rng_state()
        for actor in self._actors:
            state = collect(actor, trainers=True)
            self._containers.append(Snapshot(state.containers))
            for state_tensor in state.tensors:
                gradient = state_tensor.tensor.grad if state_tensor.tensor.is_leaf else None
                self._gradients.append((state_tensor.tensor, gradient))
                for tensor in (state_tensor.tensor, gradient):
                    if tensor is not None:
                        self._copy(tensor, before)

    def _copy(self, tensor: torch.Tensor, before: dict[int, _Pair]) -> None:
        key = storage_key(tensor)
        if key is None:  # sparse, say
            self._copies[id(tensor)] = (tensor, tensor.detach().clone())
            return
        if key in self._copies:
            return
        # Copy the whole storage: other tensors may share it, and the tensor may have gaps.
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        memory.set_(tensor.untyped_storage())
        _, copy = before.get(key, (None, None))
        if copy is None or copy.shape != memory.shape or copy.device != memory.device:
            copy = memory.clone()
        else:
            copy.copy_(memory)
        self._copies[key] = (memory, copy)

    def restore(self) -> None:
        """Restore the remembered state; tensors stay the same Python objects."""
        for snapshot in self._containers:
            snapshot.restore()
        for tensor, gradient in self._gradients:
            if tensor.is_leaf:
                set_gradient(tensor, gradient)
        with torch.no_grad():
            for memory, copy in self._copies.values():
                memory.copy_(copy)
        torch.set_rng_state(self._generator)
