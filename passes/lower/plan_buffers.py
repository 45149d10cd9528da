"""Free storage after its last use, and choose the slot of each message."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ...ir.alike.alike_programs import count_ops, representatives_of, shared_programs
from ...ir.attributes import Stream
from ...ir.ops import Call, Copy, CopyStart, Free, Op, Recv, Return, Send, Value, Wait
from ...ir.ops.module import Function, FunctionKind, Module, Program
from ...ir.ops.names import Names
from ...ir.phases import Phase
from ...ir.types import TensorType, promised, relocate, tensor_bytes
from ..analysis.liveness import Received, Storages
from ..base import Pass
from ..placement.fabrics import is_by_stream

LARGE = 256 * 1024
"""The least bytes for which handing memory over costs a host less than a copy out of a slot."""


@dataclass(frozen=True)
class PlanBuffers(Pass):
    """Free each storage after its last use, and give received and offloaded tensors slots.

    A slot is occupied from the post of its receive until the received value is freed. The slots
    follow from the receiver's program, and a send uses the slot of its receive, so that sender and
    receiver exchange nothing about slots at run time. Objects have no slot, as their size is not
    known; the receiver gets an object of its own.

    A copy to the host has a slot of its rank's host until it is freed. A slot takes copies of one
    size.

    A value that leaves the plan's control, as an operand of an opaque call or as an output, is
    copied first if it may live in a slot. If a device's transport brings it, or if it has `LARGE`
    bytes or more, it gets no slot instead, and the receive takes memory of its own. Storage that is
    still being sent is freed after the wait for the send. Values that may share storage are freed
    together.

    Before::

        %a.recv = recv() {chan = 0, peer = 0, seq = 0} : future<f32[8]>
        %a = wait(%a.recv) : f32[8]
        %h = call(%a) {fn = @stage1.forward} : f32[8]
        %h.send = send(%h) {chan = 1, peer = 2, seq = 0} : future<unit>
        %h.sent = wait(%h.send) : unit

    After::

        %a.recv = recv() {chan = 0, peer = 0, seq = 0, slot = 0} : future<f32[8]>
        %a = wait(%a.recv) : f32[8]
        %h = call(%a) {fn = @stage1.forward} : f32[8]
        free(%a)
        %h.send = send(%h) {chan = 1, peer = 2, seq = 0, slot = 1} : future<unit>
        %h.sent = wait(%h.send) : unit
        free(%h, %h.sent)
    """

    name: ClassVar[str] = "plan-buffers"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.SCHEDULED,)

    def run(self, module: Module) -> bool:
        if _is_planned(module):
            return False
        slots: dict[tuple[int, int], int] = {}
        sizes: dict[int, tuple[int, int]] = {}
        programs = representatives_of(module)
        without = _largest_into_buffers(programs)
        before = count_ops(module)
        for program in programs:
            private = _copy_or_make_private(program, module)
            storages = Storages(program, module.functions)
            ends = _insert_frees(program, storages, private)
            _choose_slots(program, module, ends, slots, sizes)
            _choose_host_slots(program)
        received = _received_like(module)
        _set_slots_of_sends(module, received, slots)
        for id_, channel in module.channels.items():
            if not channel.collective:
                like = received[id_]
                count, size = sizes.get(like, (0, without.get(like, 0)))
                module.channels[id_] = replace(channel, slots=count, slot_bytes=size)
        edges = any(not channel.collective for channel in module.channels.values())
        return edges or before != count_ops(module)


def _is_planned(module: Module) -> bool:
    if any(channel.slots is not None for channel in module.channels.values()):
        return True
    return any(isinstance(op, Free) for program in representatives_of(module) for op in program.ops)


def _received_like(module: Module) -> dict[int, int]:
    """For each edge the channel by which a program receives that stands for its receiver's."""
    shared = shared_programs(module)
    received: dict[int, int] = {}
    for id_, channel in module.channels.items():
        if not channel.collective:
            end = None if shared is None else shared.ends.get((channel.ranks[-1], id_))
            chan = None if end is None else end[1]
            received[id_] = id_ if chan is None else chan
    return received


def _set_slots_of_sends(
    module: Module, received: Mapping[int, int], slots: Mapping[tuple[int, int], int]
) -> None:
    """Give each send the slot of its receive.

    Where ranks that are alike send to ranks that are not, they may need different slots. Then each
    rank gets a program of its own.
    """
    shared = shared_programs(module)
    if shared is not None:
        chosen: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for (chan, seq), slot in slots.items():
            chosen[chan].append((seq, slot))
        at_end: dict[object, list[tuple[int, int]]] = {}
        for (rank, its), end in shared.ends.items():
            channel = module.channels[-1 if its is None else its]
            if not channel.collective and channel.ranks[0] == rank:
                slots_there = chosen[received[channel.id]]
                if at_end.setdefault(end, slots_there) != slots_there:
                    module.programs = list(module.programs)
                    break
    for program in representatives_of(module):
        for op in program.ops:
            if isinstance(op, Send):
                op.slot = slots.get((received[op.chan], op.seq))


def _copy_or_make_private(program: Program, module: Module) -> set[Recv]:
    """Copy values in slots before they are handed out; later uses take the copy.

    Returns the receives that get no slot instead.
    """
    functions = module.functions
    received = Received(program, functions)
    private: set[Recv] = set()
    names: Names | None = None
    copies: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in program.ops:
        if copies:
            op.operands = tuple([copies.get(value, value) for value in op.operands])
        if _hands_out(op, functions):
            for value in dict.fromkeys(op.operands):
                slots = received.of(value)
                if not slots:
                    continue
                if all(_may_be_private(recv, module) for recv in slots):
                    private.update(slots)
                    continue
                names = names or Names.of(program)
                copy = names.derive(value, "copy", relocate(value.type, None))
                stream = _stream_of_copy(op, ops)
                ops.append(
                    Copy((value,), (copy,), loc=op.loc, mb=op.mb, task=op.task, stream=stream)
                )
                copies[value] = copy
            op.operands = tuple([copies.get(value, value) for value in op.operands])
        ops.append(op)
    program.ops[:] = ops
    return private


def _may_be_private(recv: Recv, module: Module) -> bool:
    """True if a message should be received into memory of the receiver's own, without a slot."""
    return is_by_stream(module.channels[recv.chan]) or tensor_bytes(recv.result.type) >= LARGE


def _stream_of_copy(op: Op, before: list[Op]) -> Stream | None:
    """The stream of the op that needs a copy; for `return`, which has none, the compute stream."""
    if op.stream is None and any(previous.stream is not None for previous in before[-1:]):
        return Stream.COMPUTE
    return op.stream


def _hands_out(op: Op, functions: Mapping[str, Function]) -> bool:
    if isinstance(op, Call):
        return functions[op.fn.name].kind is FunctionKind.OPAQUE
    return isinstance(op, Return)


def _insert_frees(
    program: Program, storages: Storages, private: set[Recv]
) -> dict[Op, tuple[Recv, ...]]:
    """Free each storage that does not escape; return, by `free`, the receives whose slots end."""
    due: dict[int, list[Free]] = {}
    ends: dict[Op, tuple[Recv, ...]] = {}
    for storage in storages.all():
        if storage.escapes or not storage.owners:
            continue
        frees = [Free((owner, *storage.reads)) for owner in storage.owners]
        due.setdefault(storage.last, []).extend(frees)
        if slots := [recv for recv in storage.slots if recv not in private]:
            ends[frees[-1]] = tuple(slots)
    ops: list[Op] = []
    for index, op in enumerate(program.ops):
        ops.append(op)
        for free in due.get(index, ()):
            free.loc, free.mb, free.task = op.loc, op.mb, op.task
            ops.append(free)
    program.ops[:] = ops
    return ends


def _largest_into_buffers(programs: Sequence[Program]) -> dict[int, int]:
    """For each channel the bytes of the largest message that is received into a buffer.

    A transport needs the size of messages even where they have no slot.
    """
    largest: dict[int, int] = {}
    for program in programs:
        for op in program.ops:
            if isinstance(op, Recv) and op.operands:
                largest[op.chan] = max(largest.get(op.chan, 0), tensor_bytes(op.operands[0].type))
    return largest


def _choose_slots(
    program: Program,
    module: Module,
    ends: Mapping[Op, tuple[Recv, ...]],
    slots: dict[tuple[int, int], int],
    sizes: dict[int, tuple[int, int]],
) -> None:
    """Choose a slot for each receive of a program: of the free slots, the one freed first.

    A receive of a device waits on its stream until its slot is free, and the host runs ahead. So
    its channel has at least two slots: one message comes while the one before it is used. The tail
    of a program, too, should not share a slot with the next execution.

    Args:
        program: the program.
        module: its module.
        ends: for each `free`, the receives whose slots it frees.
        slots: filled in with the slot of each message, by channel and number.
        sizes: filled in with the number of slots and the bytes of each, by channel.
    """
    slotted = {recv for recvs in ends.values() for recv in recvs}
    free: defaultdict[int, deque[int]] = defaultdict(deque)
    for op in program.ops:
        if isinstance(op, Recv) and op in slotted:
            assert isinstance(promised(op.result.type), TensorType), "objects have no slot"
            count, size = sizes.get(op.chan, (0, 0))
            least = 2 if is_by_stream(module.channels[op.chan]) else 1
            if free[op.chan] and count >= least:
                op.slot = free[op.chan].popleft()
            else:
                op.slot, count = count, count + 1
            sizes[op.chan] = (count, max(size, tensor_bytes(op.result.type)))
            slots[op.chan, op.seq] = op.slot
        else:
            for recv in ends.get(op, ()):
                assert recv.slot is not None, "a receive comes before what it brings is freed"
                free[recv.chan].append(recv.slot)


def _choose_host_slots(program: Program) -> None:
    """Choose a slot for each copy to the host: of the free ones of its size, that freed first."""
    copies: dict[Value, CopyStart] = {}
    free: defaultdict[int, deque[int]] = defaultdict(deque)
    count = 0
    for op in program.ops:
        if isinstance(op, CopyStart) and op.is_to_host and op.memory is None:
            copies[op.result] = op
            ready = free[tensor_bytes(op.result.type)]
            if ready:
                op.slot = ready.popleft()
            else:
                op.slot, count = count, count + 1
        elif isinstance(op, Wait) and op.results and op.operands[0] in copies:
            copies[op.result] = copies[op.operands[0]]
        elif isinstance(op, Free) and (copy := copies.get(op.operands[0])) is not None:
            assert copy.slot is not None, "a copy starts before it is freed"
            free[tensor_bytes(copy.result.type)].append(copy.slot)
