"""Check batches: messages that are one operation at both ends."""

from __future__ import annotations

from collections.abc import Iterator

from ..ops import Communication, Op, Recv, Send, Wait, batch_of
from ..ops.module import Module, Program
from ..phases import Phase
from ..text.diagnostics import Diagnostic
from ..types import FutureType

_HELP = "a batch is one send and one recv, to and from the same rank, on one stream, side by side"


def check_batches(module: Module, program: Program) -> Iterator[Diagnostic]:
    """The problems with the batches of one program.

    A batch is one call of a library, with a message in each direction between two ranks. Its ops
    stand side by side, so that no rank waits for one message before the other is posted.
    """
    batches: dict[int, list[tuple[int, Send | Recv]]] = {}
    for index, op in enumerate(program.ops):
        if isinstance(op, Send | Recv) and op.batch is not None:
            batches.setdefault(op.batch, []).append((index, op))
    for number, members in batches.items():
        first, last = members[0][1], members[-1][1]
        problem = None
        if module.phase is not Phase.SCHEDULED:
            problem = (
                f"is in batch {number} in phase {module.phase}; only programs of ranks have any"
            )
        elif sorted(op.opcode for _, op in members) != ["recv", "send"]:
            problem = f"is in batch {number}, which is {_listed(members)}"
        elif first.peer != last.peer:
            problem = f"is in batch {number} with a message of rank {first.peer}"
        elif first.stream is not last.stream:
            problem = f"is in batch {number}, whose messages are on several streams"
        elif _via(module, first) != _via(module, last):
            problem = f"is in batch {number}, whose messages go by several transports"
        elif any(map(_comes_between, program.ops[members[0][0] + 1 : members[-1][0]])):
            problem = f"is in batch {number}, with waits or other messages in between"
        if problem is not None:
            yield Diagnostic(f"{last.opcode} {problem}", last, program, help=_HELP)


def unlike_batches(sent: tuple[Program, Op], received: tuple[Program, Op]) -> Iterator[Diagnostic]:
    """The problem, if any, that the two ends of a message are not in the same batch."""
    program, op = received
    sent_batch, received_batch = batch_of(sent[1]), batch_of(op)
    if sent_batch != received_batch:
        yield Diagnostic(
            f"recv is in {_named(received_batch)}, but its send is in {_named(sent_batch)}",
            op,
            program,
            help="both ends of a message are in the same batch",
            notes=(Diagnostic("sent here", sent[1], sent[0]),),
        )


def _named(batch: int | None) -> str:
    return "no batch" if batch is None else f"batch {batch}"


def _listed(members: list[tuple[int, Send | Recv]]) -> str:
    return " and ".join(f"a {op.opcode}" for _, op in members)


def _via(module: Module, op: Send | Recv) -> str | None:
    channel = module.channels.get(op.chan)
    return None if channel is None else channel.via


def _comes_between(op: Op) -> bool:
    if isinstance(op, Wait):
        return any(isinstance(value.type, FutureType) for value in op.operands)
    return isinstance(op, Communication)
