"""Derive how long messages take in a step, from recordings of the calls around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...ir.ops import Call, Collective, Op, Recv, Send, Value, Wait
from ...ir.ops.module import Module, Program
from .recording import RecordedTimes


@dataclass(frozen=True, slots=True)
class MessageLatency:
    """The latency of a message that a rank has waited for.

    Attributes:
        op: the message's send.
        time: milliseconds from the end of the call before the send to the start of the call that
            waited.
    """

    op: Send
    time: float


@dataclass(frozen=True, slots=True)
class _WaitingCall:
    """A call, the call before it on its rank, and the messages that it may wait for in between.

    Attributes:
        sends: for each message, the call before its send, and the send.
    """

    call: Call
    before: Call
    sends: tuple[tuple[Call, Send], ...]


def message_latencies(
    module: Module, recordings: Sequence[RecordedTimes], nodes: Sequence[int]
) -> Iterator[MessageLatency]:
    """The messages that recordings show a rank to have waited for.

    A rank has waited for a message if the call before the one that uses it ended before the message
    was sent. Messages between machines are left out, since their clocks differ.

    Args:
        module: scheduled.
        recordings: of its executions, the calls of all ranks.
        nodes: the machine of each rank.
    """
    waiting = list(_waiting_calls(module, nodes))
    for recording in recordings:
        times = {id(span.op): span for span in recording.spans}
        for waiting_call in waiting:
            source, op = max(waiting_call.sends, key=lambda pair: times[id(pair[0])].end)
            sent = times[id(source)].end
            if times[id(waiting_call.before)].end < sent:
                yield MessageLatency(op, times[id(waiting_call.call)].start - sent)


def _waiting_calls(module: Module, nodes: Sequence[int]) -> Iterator[_WaitingCall]:
    sends = {key: pair for program in module.programs for key, pair in _sends(program)}
    for program in module.programs:
        rank = program.rank or 0
        promised: dict[Value, tuple[Call, Send] | None] = {}
        needed: list[tuple[Call, Send] | None] = []
        before: Call | None = None
        for op in program.ops:
            if isinstance(op, Recv):
                near = nodes[op.peer] == nodes[rank]
                promised[op.result] = sends.get((op.chan, op.seq or 0)) if near else None
            elif isinstance(op, Collective):
                promised.update(dict.fromkeys(op.results, None))
            elif isinstance(op, Wait) and op.operands[0] in promised:
                needed.append(promised[op.operands[0]])
            elif isinstance(op, Call):
                known = tuple(pair for pair in needed if pair is not None)
                # A call that also waits for another message may have waited for that one.
                if before is not None and known and len(known) == len(needed):
                    yield _WaitingCall(op, before, known)
                before, needed = op, []


def _sends(program: Program) -> Iterator[tuple[tuple[int, int], tuple[Call, Send]]]:
    """Each send that is the first message after a call, with that call, by channel and number."""
    last: Op | None = None
    for op in program.ops:
        if isinstance(op, Send) and isinstance(last, Call):
            yield (op.chan, op.seq or 0), (last, op)
        if isinstance(op, Call | Send | Collective):
            last = op
