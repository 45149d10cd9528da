"""Which driven programs are sealed: their devices do all of them, so no host can fail in one."""

from __future__ import annotations

from ...ir.module import Module
from ...ir.ops import Collective, Recv, Send


def is_sealed(module: Module) -> bool:
    """Whether all messages of a module are part of graphs.

    `capture` makes them so in a program that one rank drives only where the ranks' devices can do
    everything by themselves.
    """
    messages = [
        op
        for program in module.programs
        for op in program.ops
        if isinstance(op, Send | Recv | Collective)
    ]
    return bool(messages) and all(op.graph is not None for op in messages)
