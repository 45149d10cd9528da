"""Which effect a traced function has on its actor, given what the actor's other functions do.

An UPDATE may overtake backwards, so the state that it changes must be none that a backward reads.
Functions are traced one after the other. Of two that share state, a backward that comes second is
given what its forward has saved of it; an update that comes second has to be a WRITE.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..ir.attributes import Effect
from .graphs import Piece
from .guards import storage_key
from .joint import Joint


class ActorEffects:
    """The state, by memory, that one actor's functions have been seen to use so far."""

    def __init__(self) -> None:
        self._updated: set[int | None] = set()
        self._read_by_backwards: set[int | None] = set()

    def volatile(self, joint: Joint) -> frozenset[int]:
        """Indices of state that another function updates, so that a backward must not read it."""
        return frozenset(
            index
            for index, (_, state) in enumerate(joint.state)
            if storage_key(state.tensor) in self._updated and index not in joint.backward_written
        )

    def of_forward(self, joint: Joint, piece: Piece) -> Effect:
        """The effect of a forward: it reads state, updates some of it, or writes."""
        changed = [joint.state[i][1].tensor for i in joint.written]
        changed += [rebind.tensor.tensor for rebind, _ in joint.rebinds]
        if not changed:
            return Effect.READ if piece.state else Effect.PURE
        memory = _memory(changed)
        parameters = any(isinstance(t, torch.nn.Parameter) or t.requires_grad for t in changed)
        if parameters or memory & self._read_by_backwards:
            return Effect.WRITE
        self._updated |= memory
        return Effect.UPDATE

    def of_backward(self, joint: Joint, piece: Piece) -> Effect:
        """The effect of a backward: it accumulates gradients, or, where it must, writes."""
        if joint.backward_written:
            return Effect.WRITE
        if not piece.state and not piece.gradients:
            return Effect.PURE
        memory = _memory(state.tensor for state in piece.state)
        self._read_by_backwards |= memory
        return Effect.WRITE if memory & self._updated else Effect.ACCUMULATE


def _memory(tensors: Iterable[torch.Tensor]) -> set[int | None]:
    return {storage_key(tensor) for tensor in tensors}
