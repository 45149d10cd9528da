"""Check device graphs: the parts of a program that a device may record and replay as a whole."""

from __future__ import annotations

from collections.abc import Iterator

from ..ops import Alloc, Call, Collective, Free, Op, Recv, Send, Value, Wait
from ..ops.module import FunctionKind, Module, Program
from ..ops.storage import SharedStorage
from ..text.diagnostics import Diagnostic

_HELP = "capture numbers the ops of graphs; leave graph out where the host has to do something"


def check_graphs(module: Module, program: Program) -> Iterator[Diagnostic]:
    """The problems with the graphs of one program.

    A replay runs no Python, so no graph has an op that needs the host. The ops of a graph stand in
    a row.
    """
    by_hosts: set[Value] = set()
    storage = SharedStorage(program, {})  # the calls may not be right
    received: set[Value] = set()
    last: int | None = None
    ended: set[int] = set()
    for op in program.ops:
        problem = _needs_host(op, module, by_hosts)
        if isinstance(op, Alloc):
            continue
        if isinstance(op, Wait) and problem is not None:
            received.update(map(storage.of, op.results))
        elif isinstance(op, Free) and not received.isdisjoint(map(storage.of, op.operands[:1])):
            problem = "free gives back what came from host to host"
        if op.graph is not None and problem is not None:
            yield Diagnostic(f"{problem}, and is in graph {op.graph}", op, program, help=_HELP)
        if op.graph != last and last is not None:
            ended.add(last)
        if op.graph in ended:
            message = f"{op.opcode} is in graph {op.graph}, which has ended above"
            yield Diagnostic(message, op, program, help="the ops of a graph stand in a row")
            return
        last = op.graph


def _needs_host(op: Op, module: Module, by_hosts: set[Value]) -> str | None:
    """The reason why an op needs the host, if any.

    Args:
        op: the next op of the program.
        module: its module.
        by_hosts: the futures of messages between hosts so far; those of `op` are added.
    """
    if isinstance(op, Call):
        function = module.functions.get(op.fn.name)
        if function is None:
            return None
        if function.kind is FunctionKind.OPAQUE:
            return f"{op.fn} is opaque"
        if function.kind is FunctionKind.HOST and function.parameter is None:
            return f"{op.fn} is the host's"
        return None if op.key is None else f"{op.fn} draws random numbers"
    if isinstance(op, Send | Recv | Collective):
        channel = module.channels.get(-1 if op.chan is None else op.chan)
        if channel is None or not channel.is_by_host:
            return None
        by_hosts.update(op.results)
        return f"{op.opcode} goes from host to host"
    if isinstance(op, Wait) and not by_hosts.isdisjoint(op.operands):
        return "wait is for what goes from host to host"
    return None
