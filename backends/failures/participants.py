"""Find the ranks that take part in a driven graph, and those that a command has to wake."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.ops import Collective, Recv, Return, Send
from ...ir.ops.module import Module


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


def woken_by_command(modules: Sequence[Module], driver: int) -> tuple[int, ...]:
    """The participants that the driver does not send to in every variant.

    A message of the driver wakes its receiver, so a command need not. Messages of a module that
    only devices run pass the hosts by.
    """
    receivers = [
        {
            op.peer
            for op in module.program_of(driver).ops
            if isinstance(op, Send) and not is_device_only(module)
        }
        for module in modules
    ]
    always = set.intersection(*receivers)
    return tuple(sorted(participants(modules, driver) - always))


def is_device_only(module: Module) -> bool:
    """True if devices run the whole module, so that no host can fail in it.

    Then all its messages are part of device graphs. In a driven graph, `capture` puts them there
    only where the ranks' devices can do everything by themselves.
    """
    messages = [
        op
        for program in module.programs
        for op in program.ops
        if isinstance(op, Send | Recv | Collective)
    ]
    return bool(messages) and all(op.graph is not None for op in messages)
