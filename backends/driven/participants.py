"""Which ranks a graph's executions need, and which of them a record has to wake."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.module import Module
from ...ir.ops import Return, Send
from .device_only import is_sealed


def participants(modules: Sequence[Module], driver: int) -> frozenset[int]:
    """The ranks, besides the driver, whose program does anything in some variant."""
    return frozenset(
        program.rank
        for module in modules
        for program in module.programs
        if program.rank is not None
        and program.rank != driver
        and any(not isinstance(op, Return) for op in program.ops)
    )


def woken_by_record(modules: Sequence[Module], driver: int) -> tuple[int, ...]:
    """The participants that the driver does not send to in every variant.

    A message of the driver wakes its receiver, so a record need not. Those of a sealed program go
    past the hosts.
    """
    receivers = [
        {
            op.peer
            for op in module.program_of(driver).ops
            if isinstance(op, Send) and not is_sealed(module)
        }
        for module in modules
    ]
    always = set.intersection(*receivers)
    return tuple(sorted(participants(modules, driver) - always))
