"""Make communication asynchronous: one op starts it, and another waits for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from ...ir.attributes import Traffic
from ...ir.ops import Broadcast, Collective, Op, Recv, Send, Transfer, Value, Wait
from ...ir.ops.module import Channel, Module, Program
from ...ir.ops.names import Names
from ...ir.phases import Phase
from ...ir.types import FutureType, Place, Type, UnitType, relocate
from ..base import Pass


@dataclass(frozen=True)
class SplitTransfers(Pass):
    """Split each `transfer` into `send` and `recv` or a `broadcast`, and wait for their futures.

    A value that several ranks hold is sent by the lowest of these ranks. There is one channel for
    each directed edge and transport, and one for each group, transport and traffic. `seq` numbers
    the messages of a channel. Each wait stands right behind its communication; `overlap` moves them
    apart.

    Before::

        %h = call(%x) {fn = @stage0.forward, mb = 0} : f32[2,8]@0
        %h.at1 = transfer(%h) {mb = 0} : f32[2,8]@1

    After::

        channel 0 {collective = false, ranks = {0..1}}
        ...
        %h = call(%x) {fn = @stage0.forward, mb = 0} : f32[2,8]@0
        %h.send = send(%h) {chan = 0, mb = 0, peer = 1, seq = 0} : future<unit@0>
        %h.recv = recv() {chan = 0, mb = 0, peer = 0, seq = 0} : future<f32[2,8]@1>
        %h.at1 = wait(%h.recv) {mb = 0} : f32[2,8]@1
        %h.sent = wait(%h.send) {mb = 0} : unit@0
    """

    name: ClassVar[str] = "split-transfers"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.PLACED,)
    ensures: ClassVar[Phase | None] = Phase.ASYNC

    def run(self, module: Module) -> bool:
        splitter = _Splitter(module, module.program)
        for op in module.program.ops:
            splitter.add(op)
        module.program.ops[:] = splitter.ops
        module.phase = Phase.ASYNC
        return True


class _Splitter:
    """The ops of the new program, and the channels that they use."""

    def __init__(self, module: Module, program: Program) -> None:
        self.ops: list[Op] = []
        self._module = module
        self._names = Names.of(program)
        self._channels: dict[tuple[tuple[int, ...], bool, str | None, Traffic | None], int] = {}
        self._sequence: Counter[int] = Counter()
        self._renamed: dict[Value, Value] = {}

    def add(self, op: Op) -> None:
        if self._renamed:
            op.operands = tuple([self._renamed.get(value, value) for value in op.operands])
        if isinstance(op, Transfer):
            self._add_transfer(op)
        elif isinstance(op, Collective):
            self._add_collective(op)
        else:
            self.ops.append(op)

    def _add_transfer(self, op: Transfer) -> None:
        (value,) = op.operands
        have, target = value.type.place, op.result.type.place
        assert have is not None, "a placed program says where values are"
        assert target is not None, "a placed program says where values are"
        if have.covers(target):
            self._renamed[op.result] = value
        elif target.is_single:
            self._add_message(op, value, min(have.ranks), target.rank)
        else:
            self._add_broadcast(op, value, min(have.ranks), target)

    def _add_message(self, op: Transfer, value: Value, source: int, target: int) -> None:
        chan, seq = self._next((source, target), False, op.via, op.why, op.traffic)
        done: Type = UnitType(Place.of(source))
        sent = self._value(f"{value.name}.send", _future(done))
        received = self._value(f"{value.name}.recv", _future(op.result.type))
        self.ops += (
            Send((value,), (sent,), chan=chan, peer=target, seq=seq, loc=op.loc, mb=op.mb),
            Recv((), (received,), chan=chan, peer=source, seq=seq, loc=op.loc, mb=op.mb),
            Wait((received,), (op.result,), loc=op.loc, mb=op.mb),
            Wait((sent,), (self._value(f"{value.name}.sent", done),), loc=op.loc, mb=op.mb),
        )

    def _add_broadcast(self, op: Transfer, value: Value, root: int, target: Place) -> None:
        group = Place(tuple(sorted({root, *target.ranks})))
        # The root takes part, so it gets the value as well.
        op.result.type = relocate(op.result.type, group)
        broadcast = Broadcast(
            (value,),
            (op.result,),
            group=group,
            root=root,
            via=op.via,
            why=op.why,
            loc=op.loc,
            mb=op.mb,
        )
        self._add_collective(broadcast)

    def _add_collective(self, op: Collective) -> None:
        op.chan, op.seq = self._next(op.group.ranks, True, op.via, op.why, op.traffic)
        op.traffic = op.via = op.why = None  # from here on the channel has these
        results = op.results
        op.results = tuple(
            [self._value(f"{value.name}.{op.opcode}", _future(value.type)) for value in results]
        )
        self.ops.append(op)
        for future, value in zip(op.results, results, strict=True):
            self.ops.append(Wait((future,), (value,), loc=op.loc, mb=op.mb))

    def _next(
        self,
        ranks: tuple[int, ...],
        collective: bool,
        via: str | None,
        why: str | None,
        traffic: Traffic | None = None,
    ) -> tuple[int, int]:
        """The channel between `ranks` and the number of the next message on it."""
        key = (ranks, collective, via, traffic)
        chan = self._channels.setdefault(key, len(self._channels))
        if chan not in self._module.channels:
            self._module.channels[chan] = Channel(
                chan, ranks, collective, via, why=why, traffic=traffic
            )
        seq = self._sequence[chan]
        self._sequence[chan] += 1
        return chan, seq

    def _value(self, base: str, type_: Type) -> Value:
        return Value(self._names.fresh(base), type_)


def _future(type_: Type) -> FutureType:
    assert not isinstance(type_, FutureType), "a communication promises a value"
    return FutureType(type_)
