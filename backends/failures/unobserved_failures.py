"""Find ranks whose failures never propagate to the driver.

A failed call poisons its results, and so the driver learns of it wherever one of them leads to a
value that the driver receives. A rank with a call that leads nowhere has to report by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...ir.ops import Call, Collective, Op, Recv, Send, Value
from ...ir.ops.module import Module

Node = tuple[int, Value]


def unobserved_ranks(module: Module, driver: int) -> tuple[int, ...]:
    """The ranks, ascending, that have a call none of whose results reaches rank `driver`.

    Args:
        module: a scheduled module.
        driver: the rank that starts executions.
    """
    messages: dict[tuple[int, int], list[tuple[int, Op]]] = {}
    for rank, op in _ops(module):
        if isinstance(op, (Send, Recv, Collective)) and op.chan is not None and op.seq is not None:
            messages.setdefault((op.chan, op.seq), []).append((rank, op))
    reached = _reaching(module, driver, messages)
    silent = {
        rank
        for rank, op in _ops(module)
        if isinstance(op, Call)
        and rank != driver
        and not any((rank, value) in reached for value in op.results)
    }
    return tuple(sorted(silent))


def _ops(module: Module) -> Iterator[tuple[int, Op]]:
    for program in module.programs:
        for op in program.ops:
            yield program.rank or 0, op


def _reaching(
    module: Module, driver: int, messages: dict[tuple[int, int], list[tuple[int, Op]]]
) -> set[Node]:
    """The values whose poison the driver would receive."""
    makers = {(rank, value): op for rank, op in _ops(module) for value in op.results}
    work: list[Node] = [
        (rank, value)
        for rank, op in _ops(module)
        if rank == driver and _receives(rank, op)
        for value in op.results
    ]
    reached: set[Node] = set()
    while work:
        node = work.pop()
        if node in reached:
            continue
        reached.add(node)
        op = makers.get(node)
        if op is None:
            continue
        sources = [(node[0], op)]
        if isinstance(op, (Recv, Collective)) and _receives(node[0], op):
            sources += messages.get((op.chan, op.seq), [])  # type: ignore[arg-type] # both are set
        work += [(rank, value) for rank, source_op in sources for value in source_op.operands]
    return reached


def _receives(rank: int, op: Op) -> bool:
    """True if an op gives its rank a value, or an error, that comes from another."""
    if isinstance(op, Collective):
        return rank in op.exchange.receivers
    return isinstance(op, Recv)
