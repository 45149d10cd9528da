"""Which ops are legal in which phase."""

from __future__ import annotations

from .module import Phase
from .ops import (
    AllGather,
    Alloc,
    AllReduce,
    AllToAll,
    Backward,
    Barrier,
    Broadcast,
    Call,
    Constant,
    Copy,
    Free,
    Op,
    Recv,
    ReduceScatter,
    Return,
    Send,
    Transfer,
    View,
    Wait,
)

_ALWAYS: frozenset[type[Op]] = frozenset(
    {
        Constant,
        Call,
        View,
        Copy,
        AllReduce,
        AllGather,
        ReduceScatter,
        AllToAll,
        Broadcast,
        Barrier,
        Return,
    }
)
_ASYNC: frozenset[type[Op]] = _ALWAYS | {Send, Recv, Wait}

LEGAL: dict[Phase, frozenset[type[Op]]] = {
    Phase.TRACED: _ALWAYS | {Backward, Transfer},
    Phase.PLACED: _ALWAYS | {Transfer},
    Phase.ASYNC: _ASYNC,
    Phase.SCHEDULED: _ASYNC | {Alloc, Free},
}
"""The op classes that each phase admits."""

REMEDIES: dict[type[Op], str] = {
    Backward: "differentiate replaces it with the derivative's calls",
    Transfer: "split-transfers turns it into send, recv and wait; before that, insert-transfers"
    " makes it",
    Send: "split-transfers makes it",
    Recv: "split-transfers makes it",
    Wait: "split-transfers makes it",
    Alloc: "plan-buffers makes it, in scheduled programs",
    Free: "plan-buffers makes it, in scheduled programs",
}
"""For the op classes that come and go, which pass brings or removes them."""


def has_futures(phase: Phase) -> bool:
    """Whether communication is asynchronous in this phase: its results are futures."""
    return phase in (Phase.ASYNC, Phase.SCHEDULED)


def has_places(phase: Phase) -> bool:
    """Whether types say where a value is; a scheduled program implies it."""
    return phase is not Phase.SCHEDULED
