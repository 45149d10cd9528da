"""Post receives early and wait late, so that messages travel while ranks work."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from ...ir.alike.alike_programs import representatives_of
from ...ir.attributes import Effect
from ...ir.ops import (
    Call,
    Collective,
    Communication,
    CopyStart,
    Free,
    Op,
    Recv,
    Return,
    Send,
    Value,
    Wait,
)
from ...ir.ops.module import FunctionKind, Module, Program
from ...ir.phases import Phase
from ...ir.text.diagnostics import error
from ...ir.types import FutureType, TensorType, UnitType, tensor_bytes
from ..base import Pass
from ..placement.fabrics import is_by_stream

SMALL = 1 << 16
"""The most bytes of a message that travels faster than a second branch of a device graph runs, and
of values that a host may hold until the end."""


@dataclass(frozen=True)
class Overlap(Pass):
    """Move receives of hosts up and waits down, within a bound on messages in flight.

    A receive between hosts is posted as soon as its channel has fewer than `lookahead` receives
    that are posted and not yet waited for. A wait moves down to the first use of its result. The
    wait for a send moves down to just before the `lookahead`-th next send of the same channel, or
    to the end.

    A receive between devices stays where it is, in the one order that the messages of all ranks
    have. It is a kernel that waits, and calls of the host may wait for the device, for instance to
    make a graph, allocate memory or load a module. If the receive were posted early, its message
    could depend on work that the host has yet to put on the device. And while it waits it occupies
    multiprocessors, which slows down what its rank computes beside it. `check-deadlock` proves each
    program free of deadlocks.

    Moving receives and waits causes no deadlock. The receives of a rank keep their order, over all
    channels; so do its sends, and so do its collectives. Suppose that the programs come from one
    global order of messages, in which no wait for a message stands before the post of an earlier
    message. This stays true, as receives only move up and waits only down. Suppose that no rank can
    go on, and take the first message in that order that is not complete. A rank that has not posted
    it would be blocked in a wait for a later message ahead of the post, and there is none. Ahead of
    the message on its streams are only earlier messages, which are complete. So the message is
    complete, too.

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

    An opaque method may make the host wait for its device in any case. It also cuts the graphs of a
    device, and these end once all that they have begun has ended. So waits for messages on their
    way to a device do not move past such a call.

    The wait for a copy to the host stays, too, as the tensor is freed behind it.

    Small results that a pure call makes of a collective of hosts, such as a loss of its reduced
    sum, are made at the end, if the program only returns them. So no rank waits for them before.

    Attributes:
        lookahead: the most messages of a channel that this pass leaves in flight at each end.
    """

    lookahead: int = 2

    name: ClassVar[str] = "overlap"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.SCHEDULED,)
    optional: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.lookahead < 1:
            raise ValueError(f"lookahead is at least 1, not {self.lookahead}")

    def run(self, module: Module) -> bool:
        changed = False
        for program in representatives_of(module):
            _refuse_planned(program)
            called = _call_late(program.ops, module)
            stays = _not_worth_moving(called, module, self.lookahead)
            late = _wait_late(called, module, self.lookahead, stays)
            ops = _post_early(late, module, self.lookahead)
            changed = changed or any(a is not b for a, b in zip(ops, program.ops, strict=True))
            program.ops[:] = ops
        return changed


def _computes(op: Call, module: Module) -> bool:
    """True if a call does more than hand on its operands."""
    function = module.functions[op.fn.name]
    if function.parameter is not None:
        return False
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


def _call_late(ops: Sequence[Op], module: Module) -> list[Op]:
    """Move the calls to the end that make of collectives what nothing but `return` takes."""
    taken = {value for op in ops if not isinstance(op, Return) for value in op.operands}
    awaited = _awaited_of_hosts(ops, module)
    late = [
        op
        for op in ops
        if isinstance(op, Call)
        and op.operands
        and awaited.issuperset(op.operands)  # anything else may lie in memory that an op writes to
        and taken.isdisjoint(op.results)
        and _is_small_and_pure(op, module)
    ]
    moved = set(late)
    *others, end = (op for op in ops if op not in moved)
    return [*others, *late, end]


def _is_small_and_pure(op: Call, module: Module) -> bool:
    """True if a call has no effect, and its operands take little memory until the end."""
    is_pure = module.functions[op.fn.name].effect is Effect.PURE
    return is_pure and sum(tensor_bytes(value.type) for value in op.operands) <= SMALL


def _awaited_of_hosts(ops: Sequence[Op], module: Module) -> set[Value]:
    """The results of waits for the collectives of hosts."""
    futures = {
        op.result
        for op in ops
        if isinstance(op, Collective)
        and op.chan is not None
        and not is_by_stream(module.channels[op.chan])
    }
    waits = (op for op in ops if isinstance(op, Wait) and op.operands[0] in futures)
    return {value for op in waits for value in op.results}


def _not_worth_moving(ops: Sequence[Op], module: Module, lookahead: int) -> Set[Op]:
    """The waits for small sends of devices that have no calls to move past.

    A device graph with two branches takes some microseconds longer than one with a single branch.
    """
    sends: dict[Value, Send] = {}
    sent: dict[int, int] = {}
    begun: dict[tuple[int, int], int] = {}  # calls before a channel's n-th send
    waits: list[tuple[Op, int, int, int]] = []
    done = 0
    for op in ops:
        if isinstance(op, Call) and _computes(op, module):
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


def _is_small(op: Send, module: Module) -> bool:
    """True if a message between devices is small."""
    type_ = op.operands[0].type
    is_tensor = isinstance(type_, TensorType)
    return is_by_stream(module.channels[op.chan]) and is_tensor and tensor_bytes(type_) <= SMALL


def _wait_late(ops: Sequence[Op], module: Module, lookahead: int, stays: Set[Op]) -> list[Op]:
    """Move each wait for a future, except those in `stays`, to the first use of its result.

    Waits for messages on their way to a device come no later than the next opaque method.
    """
    fixed = {value for op in ops if _is_fixed(op) for value in op.results}
    used = {value for op in ops for value in op.operands}
    to_device = _waits_of_devices(ops, module)
    moved: dict[Op, None] = {}
    held: dict[Value, Wait] = {}  # by the result of the wait, or its future if that is not used
    coming: dict[Op, None] = {}  # the waits for messages on their way to the device
    in_flight: dict[int, list[Value]] = {}
    for op in ops:
        moved.update(dict.fromkeys(held.pop(value) for value in op.operands if value in held))
        if isinstance(op, Call) and module.functions[op.fn.name].kind is FunctionKind.OPAQUE:
            moved.update(coming)
            coming.clear()
        if op in moved:
            continue
        if isinstance(op, Communication) and op.result in to_device:
            coming[to_device[op.result]] = None
        if isinstance(op, Wait) and op not in stays and _may_wait_late(op, fixed):
            future = op.operands[0]
            result = op.results[0] if op.results else future
            held[result if result in used else future] = op
            continue
        if isinstance(op, (Send, Collective)) and op.chan is not None and _only_gives(op):
            earlier = in_flight.setdefault(op.chan, [])
            earlier.append(op.result)
            if len(earlier) > lookahead and earlier[0] in held:
                moved[held.pop(earlier[0])] = None
            del earlier[:-lookahead]
        elif isinstance(op, Return):
            moved.update(dict.fromkeys(held.values()))
        moved[op] = None
    return list(moved)


def _waits_of_devices(ops: Sequence[Op], module: Module) -> dict[Value, Wait]:
    """For each future of a message that comes to a device by a stream, the first wait for it."""
    futures = {
        op.result
        for op in ops
        if isinstance(op, Recv | Collective)
        and op.chan is not None
        and is_by_stream(module.channels[op.chan])
    }
    waits: dict[Value, Wait] = {}
    for op in ops:
        if isinstance(op, Wait) and op.operands[0] in futures:
            waits.setdefault(op.operands[0], op)
    return waits


def _only_gives(op: Communication) -> bool:
    """True if an op has an operand, and its future promises nothing but a unit."""
    type_ = op.result.type
    return bool(op.operands) and isinstance(type_, FutureType) and isinstance(type_.value, UnitType)


def _is_fixed(op: Op) -> bool:
    """True if the wait for an op stays where it is.

    At a barrier ranks meet, and behind the wait for a copy to the host the tensor is freed.
    """
    return op.synchronizes or (isinstance(op, CopyStart) and op.is_to_host)


def _may_wait_late(op: Wait, fixed: set[Value]) -> bool:
    return isinstance(op.operands[0].type, FutureType) and op.operands[0] not in fixed


def _post_early(ops: Sequence[Op], module: Module, lookahead: int) -> list[Op]:
    """Move each receive of a host up to where its channel has room, in the order of receives.

    Args:
        ops: the ops of a program.
        module: its module.
        lookahead: as in `Overlap`.
    """
    receives = [op for op in ops if isinstance(op, Recv)]
    channels = {op.result: op.chan for op in receives}
    moved: list[Op] = []
    posted = 0
    in_flight: dict[int, int] = {}

    def post_while_there_is_room(until: int) -> None:
        """Post receives as far as the bound allows, and the first `until` ones in any case."""
        nonlocal posted
        while posted < len(receives):
            op = receives[posted]
            count = in_flight.get(op.chan, 0)
            stays = bool(op.operands) or is_by_stream(module.channels[op.chan])
            if posted >= until and (count >= lookahead or stays):
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
        if isinstance(op, Wait) and op.operands[0] in channels:
            in_flight[channels[op.operands[0]]] -= 1
            post_while_there_is_room(seen)
    return moved
