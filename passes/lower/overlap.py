"""Post receives early and wait late, so that messages travel while ranks work."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import ClassVar

from ...ir.attributes import Effect
from ...ir.diagnostics import error
from ...ir.flops import Flops
from ...ir.module import Module, Program
from ...ir.ops import Call, Collective, Free, Op, Recv, Return, Send, Value, Wait
from ...ir.phases import Phase
from ...ir.types import DType, FutureType, TensorType, UnitType, promised, tensor_bytes
from ..base import Pass
from ..placement.fabrics import is_by_stream

SMALL = 1 << 16
"""Bytes of a message that travels in less time than a second branch of a device's graph takes."""


@dataclass(frozen=True)
class Overlap(Pass):
    """Move receives up and waits down, within a bound on messages in flight.

    A receive is posted as soon as its channel has fewer than `lookahead` receives that have been
    posted and not been waited for, and no more than `ahead` calls are left before it is needed; one
    that is posted earlier stays. A wait moves down to the first use of what it gives. The wait for
    a send moves down to just before the send of the same channel that is `lookahead` later, or to
    the end. Small messages between devices move over calls that compute, or not at all: side by
    side with each other they would cost more than they take.

    Why this cannot bring about a deadlock: the receives of a rank keep their order among each
    other, over all channels; so do its sends; and so do its collectives. Suppose that the programs
    come from one global order of messages, in which no wait for a message stands before the posting
    of an earlier one. That still holds afterwards: receives only move up, waits only down. Take the
    first message in that order that is not complete when nothing moves. A rank that has not posted
    it stays at a wait for a later message, which would have to stand before it: it does not. Ahead
    of it on its streams are only earlier messages, and these are complete. So it is complete, too.

    Before::

        %a.recv = recv() {chan = 0, peer = 0, seq = 0} : future<f32[8]>
        %a = wait(%a.recv) : f32[8]
        %h = call(%a) {fn = @stage1.forward} : f32[8]
        %h.send = send(%h) {chan = 1, peer = 2, seq = 0} : future<unit>
        %h.sent = wait(%h.send) : unit
        %b.recv = recv() {chan = 0, peer = 0, seq = 1} : future<f32[8]>
        ...

    After::

        %a.recv = recv() {chan = 0, peer = 0, seq = 0} : future<f32[8]>
        %b.recv = recv() {chan = 0, peer = 0, seq = 1} : future<f32[8]>
        %a = wait(%a.recv) : f32[8]
        %h = call(%a) {fn = @stage1.forward} : f32[8]
        %h.send = send(%h) {chan = 1, peer = 2, seq = 0} : future<unit>
        ...
        %h.sent = wait(%h.send) : unit
        return()

    A receive that a device carries out waits on its multiprocessors. A channel whose receives do so
    while their rank computes is marked `background`, with how much that is, and its transport takes
    fewer of them where that pays. Nor
    does a device take any number of kernels behind a receive that waits: CUDA stops launching a
    graph after some thousands, and if the message is sent by what comes then, nothing moves any
    more.

    Attributes:
        lookahead: how many messages of a channel this pass lets be in flight at each end.
        ahead: how many calls that compute may stand between a receive that is moved up and the
            wait for it.
    """

    lookahead: int = 2
    ahead: int = 2

    name: ClassVar[str] = "overlap"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.SCHEDULED,)
    optional: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.lookahead < 1:
            raise ValueError(f"lookahead is at least 1, not {self.lookahead}")
        if self.ahead < 0:
            raise ValueError(f"ahead is at least 0, not {self.ahead}")

    def run(self, module: Module) -> bool:
        changed = False
        for program in module.programs:
            _refuse_planned(program)
            calls = {op for op in program.ops if isinstance(op, Call) and _computes(op, module)}
            stays = _not_worth_moving(program.ops, module, calls, self.lookahead)
            late = _wait_late(program.ops, self.lookahead, stays)
            small = {op for op in late if isinstance(op, Recv) and _is_small(op, module)}
            ops = _post_early(late, calls, small, self.lookahead, self.ahead)
            changed = changed or any(a is not b for a, b in zip(ops, program.ops, strict=True))
            program.ops[:] = ops
        return _mark_background(module) or changed


def _mark_background(module: Module) -> bool:
    """Mark the channels of devices on which receives wait while their rank computes."""
    receives: Counter[int] = Counter()
    beside: defaultdict[int, Counter[DType]] = defaultdict(Counter)
    found: set[int] = set()
    for program in module.programs:
        for chan, calls, flops in _beside_receives(program, module):
            receives[chan] += 1
            beside[chan].update(flops)
            if calls:
                found.add(chan)
    changed = False
    for id_, channel in module.channels.items():
        marked = id_ in found and is_by_stream(channel)
        background = Flops.of(beside[id_]).scaled(1, receives[id_]) if marked else None
        changed = changed or background != channel.background
        module.channels[id_] = replace(channel, background=background)
    return changed


def _beside_receives(
    program: Program, module: Module
) -> Iterator[tuple[int, int, Mapping[DType, int]]]:
    """For each receive its channel, and the calls and operations between its posting and wait."""
    calls = 0
    flops: Counter[DType] = Counter()
    posted: dict[Value, tuple[int, int, Counter[DType]]] = {}
    for op in program.ops:
        if isinstance(op, Recv):
            posted[op.result] = op.chan, calls, flops.copy()
        elif isinstance(op, Wait) and op.operands[0] in posted:
            chan, calls_before, flops_before = posted.pop(op.operands[0])
            yield chan, calls - calls_before, flops - flops_before
        elif isinstance(op, Call) and _computes(op, module):
            calls += 1
            for dtype, count in module.functions[op.fn.name].flops.counts:
                flops[dtype] += count


def _computes(op: Call, module: Module) -> bool:
    """True if a call does more than to hand on what it gets."""
    function = module.functions[op.fn.name]
    return function.effect is not Effect.PURE or len(function.aliases) < len(function.outputs)


def _refuse_planned(program: Program) -> None:
    for op in program.ops:
        if isinstance(op, Free) or (isinstance(op, Recv) and op.slot is not None):
            raise error(
                "overlap cannot move messages whose buffers are planned already",
                op=op,
                program=program,
                help="run overlap before plan-buffers",
            )


def _not_worth_moving(
    ops: Sequence[Op], module: Module, calls: Set[Call], lookahead: int
) -> Set[Op]:
    """The waits for small sends on devices with nothing to compute before they would have to end.

    A graph of a device with two branches takes some microseconds longer than one with one.
    """
    sends: dict[Value, Send] = {}
    sent: dict[int, int] = {}
    begun: dict[tuple[int, int], int] = {}  # calls before a channel's n-th send
    waits: list[tuple[Op, int, int, int]] = []
    done = 0
    for op in ops:
        if op in calls:
            done += 1
        elif isinstance(op, Send):
            sends[op.result] = op
            sent[op.chan] = number = sent.get(op.chan, 0) + 1
            begun[op.chan, number] = done
        elif isinstance(op, Wait) and op.operands[0] in sends:
            send = sends[op.operands[0]]
            if _is_small(send, module):
                waits.append((op, done, send.chan, sent[send.chan] + lookahead))
    return {op for op, at, chan, number in waits if begun.get((chan, number), done) == at}


def _is_small(op: Send | Recv, module: Module) -> bool:
    """True if a message between devices is small."""
    type_ = op.operands[0].type if isinstance(op, Send) else op.result.type
    is_tensor = isinstance(promised(type_), TensorType)
    return is_by_stream(module.channels[op.chan]) and is_tensor and tensor_bytes(type_) <= SMALL


def _wait_late(ops: Sequence[Op], lookahead: int, stays: Set[Op]) -> list[Op]:
    """Move each wait for a future to where it is needed, but for those that stay."""
    barriers = {value for op in ops if op.synchronizes for value in op.results}
    used = {value for op in ops for value in op.operands}
    moved: list[Op] = []
    held: dict[Value, Wait] = {}  # by what the wait gives, or its future if that is not used
    in_flight: dict[int, list[Value]] = {}
    for op in ops:
        for value in op.operands:
            if value in held:
                moved.append(held.pop(value))
        if isinstance(op, Wait) and op not in stays and _may_wait_late(op, barriers):
            future = op.operands[0]
            given = op.results[0] if op.results else future
            held[given if given in used else future] = op
            continue
        if isinstance(op, (Send, Collective)) and op.chan is not None and _only_gives(op):
            earlier = in_flight.setdefault(op.chan, [])
            earlier.append(op.result)
            if len(earlier) > lookahead:
                wait = held.pop(earlier.pop(0), None)
                moved += () if wait is None else (wait,)
        elif isinstance(op, Return):
            moved += held.values()
        moved.append(op)
    return moved


def _only_gives(op: Send | Collective) -> bool:
    """True if an op gives something away, and gets nothing but the word that this has gone."""
    type_ = op.result.type
    return bool(op.operands) and isinstance(type_, FutureType) and isinstance(type_.value, UnitType)


def _may_wait_late(op: Wait, barriers: set[Value]) -> bool:
    return isinstance(op.operands[0].type, FutureType) and op.operands[0] not in barriers


def _post_early(
    ops: Sequence[Op], calls: Set[Call], small: Set[Recv], lookahead: int, ahead: int
) -> list[Op]:
    """Move each receive to where its channel has room for it, without overtaking another.

    Args:
        calls: those of `ops` that compute.
        small: receives that only move up over such.
        lookahead, ahead: as in `Overlap`.
    """
    receives = [op for op in ops if isinstance(op, Recv)]
    channels = {op.result: op.chan for op in receives}
    needed = _calls_before_waits(ops, calls)
    moved: list[Op] = []
    posted = done = 0
    in_flight: dict[int, int] = {}

    def post_while_there_is_room(until: int) -> None:
        """Post receives as the bound allows, and those before `until` in any case."""
        nonlocal posted
        while posted < len(receives):
            op = receives[posted]
            count = in_flight.get(op.chan, 0)
            left = needed.get(op.result, done) - done
            too_early = left > ahead or (op in small and not left)
            if posted >= until and (count >= lookahead or too_early or op.operands):
                break
            in_flight[op.chan] = count + 1
            moved.append(op)
            posted += 1

    seen = 0
    post_while_there_is_room(0)
    for op in ops:
        if isinstance(op, Recv):
            seen += 1
            post_while_there_is_room(seen)
            continue
        moved.append(op)
        if op in calls:
            done += 1
            post_while_there_is_room(seen)
        elif isinstance(op, Wait) and op.operands[0] in channels:
            in_flight[channels[op.operands[0]]] -= 1
            post_while_there_is_room(seen)
    return moved


def _calls_before_waits(ops: Sequence[Op], calls: Set[Call]) -> dict[Value, int]:
    """For each future, how many of the calls stand before the first wait for it."""
    before: dict[Value, int] = {}
    done = 0
    for op in ops:
        if op in calls:
            done += 1
        elif isinstance(op, Wait):
            before.setdefault(op.operands[0], done)
    return before
