"""`cg.carry`: a value that one execution leaves for the next, on a rank that the user chooses."""

from __future__ import annotations

from typing import Any

import torch

from ...backends.program.value_copies import duplicate_object
from ...tracer.record.actors.actors import ActorHandle
from ...tracer.values.opaque import opaque
from .api import actor


@actor
class Carry(torch.nn.Module):
    """Holds a tensor, whose dtype and shape do not change.

    `rows`, int64 [n], selects rows of it: of a tensor [m, ...] the value is then [n, ...].
    """

    value: torch.Tensor

    def __init__(self, initial: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("value", initial.detach().clone())

    def get(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The value, or some rows of it."""
        return self.value.clone() if rows is None else self.value.index_select(0, rows)

    def set(self, value: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Replace the value, or some rows of it; of a row that is named twice, one value counts.

        Raises:
            ValueError: the new one has another dtype or shape.
        """
        old = self.value
        shape = old.shape if rows is None else (*rows.shape, *old.shape[1:])
        if value.dtype is not old.dtype or value.shape != shape:
            raise ValueError(
                f"cg.carry holds {old.dtype} of shape {tuple(shape)}, and is set to "
                f"{value.dtype} of shape {tuple(value.shape)}; convert the value, or let the carry "
                "begin with one like it"
            )
        if rows is None:
            old.copy_(value)
        else:
            old.index_copy_(0, rows, value)


@actor
class CarryObject:
    """Holds a Python object."""

    def __init__(self, initial: Any) -> None:
        self.value = initial

    @opaque
    def get(self) -> Any:
        """The value."""
        return self.value

    @opaque
    def set(self, value: Any) -> None:
        """Replace the value by a copy: a sender on this rank may change its own object later.

        Raises:
            TransportError: it cannot be pickled.
        """
        self.value = duplicate_object(value)


def carry(initial: Any, *, on: int) -> ActorHandle:
    """An actor that carries a value from one execution of a step to the next.

    In a step, `carried.get()` is what the last `carried.set(value)` has left, in the same execution
    or in an earlier one; before the first it is `initial`. Of a tensor, `carried.get(rows)` and
    `carried.set(value, rows)` read and replace some rows alone; `rows` are int64. It is state like
    that of any actor: the executions in flight read and write it in the order in which they were
    started, and the value goes from where it is made to rank `on` without passing the driver.

    Args:
        initial: a tensor, whose dtype and shape every later value must have; or any other object,
            of which only the one on rank `on` counts.
        on: the rank that keeps it.

    Raises:
        ActorError: the world has no such rank.
    """
    cls = Carry if isinstance(initial, torch.Tensor) else CarryObject
    return actor.place(cls, on)(initial)
