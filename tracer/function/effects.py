"""Find the effect of a traced function on its actor, given what other functions of the step do.

An UPDATE may overtake backwards, so no backward may read the state that it changes. Functions are
traced one after the other. If the update is traced first, the forward saves the shared state for
the backward. If the backward is traced first, the update becomes a WRITE.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ...ir.attributes import Effect
from ..method.joint_graph import Joint
from ..values.actor_state import StateTensor
from ..values.interface import Write
from ..values.operators import storage_key


class Effects:
    """The memory that the functions of a step, traced so far, use.

    Actors may share memory, so one object covers all actors.
    """

    def __init__(self) -> None:
        self._updated: set[int | None] = set()
        self._read_by_backwards: set[int | None] = set()
        self._written_by: dict[str, set[int | None]] = {}
        self._replaced_by: dict[str, set[int | None]] = {}

    def volatile(self, joint: Joint, between: Iterable[Write]) -> frozenset[int]:
        """The indices of state that a backward must not read in place.

        Another function updates this state, or gives it a new tensor between the forward and the
        backward.
        """
        memory = self._updated.union(*(self._replaced_by.get(w.function, ()) for w in between))
        if not memory:
            return frozenset()
        return frozenset(
            index
            for index, state in enumerate(joint.tensors)
            if any(storage_key(held.tensor) in memory for held in state.held)
            and index not in joint.backward_written
        )

    def written_by(self, write: Write) -> set[int | None]:
        """The memory that a traced function writes to in place; empty for an opaque function."""
        return self._written_by.get(write.function, set())

    def unknown(self, between: Iterable[Write]) -> list[Write]:
        """The writes of opaque functions: nobody knows before the run what they change."""
        return [write for write in between if write.function not in self._written_by]

    def of_forward(self, joint: Joint, state: Sequence[StateTensor], name: str) -> Effect:
        """The effect of the forward `name`: pure, read, update or write."""
        written, replaced = written_state(joint), replaced_state(joint)
        self._written_by[name], self._replaced_by[name] = memory_of(written), memory_of(replaced)
        changed = written + replaced
        if not changed:
            return Effect.READ if state else Effect.PURE
        memory = memory_of(changed)
        parameters = any(isinstance(t, torch.nn.Parameter) or t.requires_grad for t in changed)
        if parameters or memory & self._read_by_backwards:
            return Effect.WRITE
        self._updated |= memory
        return Effect.UPDATE

    def of_backward(
        self, joint: Joint, state: Sequence[StateTensor], graded: Sequence[StateTensor]
    ) -> Effect:
        """The effect of a backward: pure, accumulate, or write.

        A backward writes if it changes state, or reads state that another function updates.
        """
        if joint.backward_written:
            return Effect.WRITE
        if not state and not graded:
            return Effect.PURE
        memory = memory_of(state_tensor.tensor for state_tensor in state)
        self._read_by_backwards |= memory
        return Effect.WRITE if memory & self._updated else Effect.ACCUMULATE


def written_state(joint: Joint) -> list[torch.Tensor]:
    """The state that a forward writes to in place."""
    return [joint.tensors[i].tensor for i in joint.written]


def replaced_state(joint: Joint) -> list[torch.Tensor]:
    """The state that a forward gives a new tensor."""
    return [rebind.tensor.tensor for rebind in joint.rebound]


def memory_of(tensors: Iterable[torch.Tensor]) -> set[int | None]:
    """The keys of the storages that tensors use."""
    return {storage_key(tensor) for tensor in tensors}
