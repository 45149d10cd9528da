"""Give every op a stream, and insert waits where a value goes from one stream to another."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...ir.alike.alike_programs import representatives_of
from ...ir.attributes import Stream, Traffic
from ...ir.ops import Collective, CopyStart, Free, Op, Recv, Return, Send, Value, Wait
from ...ir.ops.module import Channel, Module, Program
from ...ir.ops.names import Names
from ...ir.phases import Phase
from ..base import Pass
from ..placement.fabrics import is_by_stream, one_by_one


@dataclass(frozen=True)
class AssignStreams(Pass):
    """Put each kind of communication, copies to a host, copies back and all other work on a stream.

    A receive between devices is on the compute stream. It is a kernel that occupies multiprocessors
    until its message has come, and work beside it is slowed down by far more than their share. On
    the compute stream it begins when its rank has nothing else to do. Meanwhile its sender, whose
    sends are on a stream of their own, puts the message into buffers of the library.

    A receive of a ring has a stream of its own, beside what its rank computes. The ranks of a ring
    send at the same time, so it does not wait for long.

    The result of a wait for a future is on the compute stream. If a value is used on another stream
    than the one that makes it, a wait brings it to that stream just before its first use there.

    Before::

        %h = call(%x) {fn = @stage0.forward} : f32[8,512]
        %h.send = send(%h) {chan = 0, peer = 1, seq = 0} : future<unit>
        %h.sent = wait(%h.send) : unit

    After::

        %h = call(%x) {fn = @stage0.forward, stream = compute} : f32[8,512]
        %h.on_send = wait(%h) {stream = send} : f32[8,512]
        %h.send = send(%h.on_send) {chan = 0, peer = 1, seq = 0, stream = send} : future<unit>
        %h.sent = wait(%h.send) {stream = compute} : unit

    Attributes:
        rendezvous: as in `Fabrics`; sends and receives of such a transport share one stream.
    """

    rendezvous: str = ""

    name: ClassVar[str] = "assign-streams"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.SCHEDULED,)

    def run(self, module: Module) -> bool:
        single = one_by_one(module, self.rendezvous)
        channels = [_streams_of(channel, single) for channel in module.channels.values()]
        streams = dict(zip(module.channels, channels, strict=True))
        changed = [_assign(program, streams) for program in representatives_of(module)]
        return any(changed)


@dataclass(frozen=True)
class _ChannelStreams:
    """The streams of the ops of a channel."""

    send: Stream
    recv: Stream
    collective: Stream


def _streams_of(channel: Channel, single: Collection[int]) -> _ChannelStreams:
    collective = Stream.COLLECTIVE if channel.traffic is None else channel.traffic.stream
    if channel.id in single:
        return _ChannelStreams(Stream.MESSAGE, Stream.MESSAGE, collective)
    is_beside = channel.traffic is Traffic.RING or not is_by_stream(channel)
    recv = Stream.RECV if is_beside else Stream.COMPUTE
    return _ChannelStreams(Stream.SEND, recv, collective)


def _stream_of(op: Op, streams: Mapping[int, _ChannelStreams]) -> Stream | None:
    if op.stream is not None or isinstance(op, (Return, Free)):
        return op.stream
    if isinstance(op, Send):
        return streams[op.chan].send
    if isinstance(op, Recv):
        return streams[op.chan].recv
    if isinstance(op, CopyStart):
        return op.home_stream
    if isinstance(op, Collective):
        return Stream.COLLECTIVE if op.chan is None else streams[op.chan].collective
    return Stream.COMPUTE


def _assign(program: Program, streams: Mapping[int, _ChannelStreams]) -> bool:
    names = Names.of(program)
    made_on: dict[Value, Stream] = {}
    waited: dict[tuple[Value, Stream], Value] = {}
    ops: list[Op] = []
    changed = False
    for op in program.ops:
        stream = _stream_of(op, streams)
        changed = changed or stream is not op.stream
        op.stream = stream
        if stream is not None and type(op) is not Wait:
            for value in op.operands:
                if made_on.get(value, stream) is not stream:
                    _bring(op, value, stream, waited, ops, names)
                    changed = True
        if stream is not None:
            for value in op.results:
                made_on[value] = stream
        ops.append(op)
    program.ops[:] = ops
    return changed


def _bring(
    op: Op,
    value: Value,
    stream: Stream,
    waited: dict[tuple[Value, Stream], Value],
    ops: list[Op],
    names: Names,
) -> None:
    """Make `op` take `value` on its own stream."""
    there = waited.get((value, stream))
    if there is None:
        there = names.derive(value, f"on_{stream.value}", value.type)
        waited[value, stream] = there
        ops.append(Wait((value,), (there,), stream=stream, loc=op.loc, mb=op.mb, task=op.task))
    op.operands = tuple([there if operand is value else operand for operand in op.operands])
