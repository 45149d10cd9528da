"""Cut each rank's program into parts that its device can record and replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from ...ir.attributes import MAIN, TAIL, Stream
from ...ir.ops import (
    Alloc,
    Assemble,
    Call,
    Collective,
    Communication,
    Constant,
    Copy,
    Op,
    Recv,
    Reserve,
    Return,
    Slice,
    Value,
    Wait,
    batch_of,
)
from ...ir.ops.module import FunctionKind, Module, Program
from ...ir.ops.storage import SharedStorage
from ...ir.phases import Phase
from ..base import Pass
from ..placement.fabrics import Fabrics

LEAST = 2
"""The number of ops that are worth a graph, unless one is a call: a call may be a whole model."""


@dataclass(frozen=True)
class Capture(Pass):
    """Number the longest runs of ops that a device can do without the host.

    The host comes in where a method is opaque, where random numbers are drawn, and where a message
    travels between hosts; receives that are under way meanwhile are not part of a graph. All ops
    between such places are of one graph, which is put on the device by a single launch from the
    third execution on.

    The method `update` is opaque here:

    Before::

        %h = call(%x) {fn = @stage0.forward, stream = compute} : f32[8]
        %s.0 = wait(%h) {stream = send} : f32[8]
        %d = send(%s.0) {chan = 0, peer = 1, seq = 0, stream = send} : future<unit>
        %u = call() {fn = @stage0.update, stream = compute} : unit

    After::

        %h = call(%x) {fn = @stage0.forward, graph = 0, stream = compute} : f32[8]
        %s.0 = wait(%h) {graph = 0, stream = send} : f32[8]
        %d = send(%s.0) {chan = 0, graph = 0, peer = 1, seq = 0, stream = send} : future<unit>
        %u = call() {fn = @stage0.update, stream = compute} : unit

    Attributes:
        ranks: as in `Fabrics`; a rank without a device captures nothing.
        driven: whether one rank starts executions of the programs. Messages between devices are
            then announced by hosts, one by one, and only what is computed between them is part of a
            graph; unless all programs are one graph each: ranks agree to run them before any does,
            nothing can fail on a host then, and nothing needs to be announced.
        rendezvous: as in `Fabrics`; what goes by such a transport keeps the order of its stream,
            in graphs and outside.
    """

    ranks: str = ""
    driven: bool = False
    rendezvous: str = ""

    name: ClassVar[str] = "capture"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.SCHEDULED,)
    optional: ClassVar[bool] = True

    def run(self, module: Module) -> bool:
        fabrics = Fabrics(self.ranks, rendezvous=self.rendezvous)
        messages = not self.driven or _needs_no_host(module, fabrics)
        changed = False
        for program in module.programs:
            if fabrics.of_rank(program.rank or 0) is not None:
                changed = _number(module, program, fabrics, messages) or changed
        return changed


@dataclass(frozen=True, slots=True)
class Cut:
    """An op at which a program leaves its device.

    Attributes:
        op: what the host has to do.
        index: of that op in the program.
        reason: why, in words.
    """

    op: Op
    index: int
    reason: str


def cuts(module: Module, program: Program, fabrics: Fabrics, messages: bool = True) -> list[Cut]:
    """The cuts that keep a rank's program from being one graph, in order."""
    hosts: set[Value] = set()
    reasons: dict[int, str] = {}
    for index, op in enumerate(program.ops):
        reason = _reason(op, module, fabrics, hosts)
        if not messages and isinstance(op, Communication | Wait):
            reason = "messages are announced"
        if reason is not None:
            reasons[index] = reason
    in_turn = {id_ for id_, channel in module.channels.items() if fabrics.is_one_by_one(channel)}
    while True:
        crossing = _crossing(program, reasons)
        outside = reasons.keys() | crossing.keys() | _too_little(program, reasons)
        crossing = crossing | _overtaking(program, outside, in_turn)
        if not crossing:
            break
        reasons.update(crossing)
    return [Cut(program.ops[index], index, reason) for index, reason in sorted(reasons.items())]


def _needs_no_host(module: Module, fabrics: Fabrics) -> bool:
    """True if each rank's device can do all of its program in one go."""
    if any(map(fabrics.is_one_by_one, module.channels.values())):
        return False  # their operations are in one order with those that hosts announce
    for program in module.programs:
        if all(isinstance(op, Return) for op in program.ops):
            continue
        if (
            fabrics.of_rank(program.rank or 0) is None
            or cuts(module, program, fabrics)
            or _too_little(program, ())
        ):
            return False
    return True


def _crossing(program: Program, reasons: Mapping[int, str]) -> dict[int, str]:
    """Find receives and collectives that are posted in one part and awaited in another, and waits.

    A graph is over when all is over that it began: what is to go on beside what the host does is
    not part of it.
    """
    parts = _part_numbers(program, reasons)
    posted: dict[Value, int] = {}
    crossing: dict[int, str] = {}
    for index, op in enumerate(program.ops):
        if isinstance(op, Recv | Collective):
            posted[op.result] = index
        elif isinstance(op, Wait):
            at = posted.pop(op.operands[0], None)
            if at is not None and at not in reasons and parts[at] != parts[index]:
                kind = "receive" if isinstance(program.ops[at], Recv) else "collective"
                crossing[at] = f"a {kind} that goes on beside what the host does"
            if at is not None and index not in reasons and (at in reasons or at in crossing):
                crossing[index] = "a wait for what goes on beside that"
    crossing |= _torn(program, reasons, parts)
    return crossing | _mates(program, reasons.keys() | crossing.keys())


def _part_numbers(program: Program, reasons: Mapping[int, str]) -> list[int]:
    """For each op the number of the part between cuts that it is in."""
    parts: list[int] = []
    part = 0
    for index in range(len(program.ops)):
        part += index in reasons
        parts.append(part)
    return parts


def _torn(program: Program, reasons: Mapping[int, str], parts: Sequence[int]) -> dict[int, str]:
    """Find what is put together in place, but not in one part.

    What a graph reads from outside is copied into its memory, and what it leaves is copied out: a
    buffer would be part of its whole no more.
    """
    storage = SharedStorage(program, {})
    assemblies: dict[Value, list[int]] = {}
    owners: dict[Value, list[int]] = {}
    for index, op in enumerate(program.ops):
        if isinstance(op, Reserve):
            assembly = assemblies[op.results[0]] = [index]
            owners.update((storage.of(value), assembly) for value in op.results)
        elif isinstance(op, Recv | Copy | Assemble) and op.shared_operand is not None:
            owners.get(storage.of(op.shared_operand), []).append(index)
    return {
        index: "a tensor that is put together ahead of what the host does, and behind it"
        for indices in assemblies.values()
        if len({parts[index] for index in indices}) > 1 or not reasons.keys().isdisjoint(indices)
        for index in indices
        if index not in reasons
    }


def _overtaking(program: Program, left: Collection[int], in_turn: Set[int]) -> dict[int, str]:
    """Find messages of graphs that could overtake one of their stream that was posted outside.

    A graph has branches of its own in place of the device's streams, and its branches wait for
    nothing but what the compute stream has waited for when the graph begins.
    """
    pending: dict[Stream | None, list[Value]] = {}
    overtaking: dict[int, str] = {}
    for index, op in enumerate(program.ops):
        if isinstance(op, Wait):
            for ahead in pending.values():
                if op.operands[0] in ahead:
                    del ahead[: ahead.index(op.operands[0]) + 1]
        elif isinstance(op, Communication) and op.chan in in_turn:
            ahead = pending.setdefault(op.stream, [])
            if index in left:
                ahead.append(op.result)
            elif ahead:
                overtaking[index] = "a message behind such a one, on the same stream"
    return overtaking


def _too_little(program: Program, left: Collection[int]) -> set[int]:
    """The ops between two that are left to the host that are not worth a graph."""
    parts = _parts(program, left)
    return {index for part in parts if _work(part.values()) < LEAST for index in part}


def _mates(program: Program, left: Set[int]) -> dict[int, str]:
    """The ops that are in a batch with one that is left to the host, and are not left to it."""
    batches = {index: batch_of(op) for index, op in enumerate(program.ops)}
    torn = {batches[index] for index in left} - {None}
    return {
        index: "a message in a batch with such a one"
        for index, batch in batches.items()
        if batch in torn and index not in left
    }


def describe(module: Module, fabrics: Fabrics, messages: bool = True) -> str:
    """For each rank with a device the graphs of its program, and what cuts it, in words."""
    lines = []
    for program in module.programs:
        if fabrics.of_rank(program.rank or 0) is None:
            lines.append(f"rank {program.rank}: no device")
            continue
        if not _work(program.ops):
            lines.append(f"rank {program.rank}: nothing to do")
            continue
        graphs = {op.graph for op in program.ops if op.graph is not None}
        program_cuts = cuts(module, program, fabrics, messages)
        summary = f"{len(graphs)} graphs"
        if not program_cuts and graphs == {MAIN}:
            summary = "one graph, the whole program"
        elif not program_cuts and messages and graphs == {MAIN, TAIL}:
            summary = "one graph and its tail, the whole program"
        lines.append(f"rank {program.rank}: {summary}")
        lines += _counted("cut", [cut.reason for cut in program_cuts])
        lines += _counted(
            "left out", _left_out(program, {cut.index for cut in program_cuts}, messages)
        )
    return "\n".join(lines) + "\n"


def _counted(label: str, reasons: Sequence[str]) -> list[str]:
    return [f"  {label} {count} times: {reason}" for reason, count in Counter(reasons).items()]


def _left_out(program: Program, left_to_host: Set[int], messages: bool) -> list[str]:
    """For each part between cuts that is no graph, why."""
    parts = [
        part.values()
        for part in _parts(program, left_to_host)
        if _work(part.values()) and all(op.graph is None for op in part.values())
    ]
    return [
        "the pass `capture` is switched off"
        if _is_worth_it(part, messages)
        else f"a part with {_work(part)} of the {LEAST} ops that are worth a graph"
        for part in parts
    ]


def _number(module: Module, program: Program, fabrics: Fabrics, messages: bool) -> bool:
    before = [op.graph for op in program.ops]
    left_to_host = {cut.index for cut in cuts(module, program, fabrics, messages)}
    for op in program.ops:
        op.graph = None
    number = 0
    for part in _parts(program, left_to_host):
        if _is_worth_it(part.values(), messages):
            for op in part.values():
                op.graph = number
            number += 1
    return before != [op.graph for op in program.ops]


def _parts(program: Program, left_to_host: Collection[int]) -> list[dict[int, Op]]:
    """The ops in a row that the host is not needed for, by index."""
    parts: list[dict[int, Op]] = [{}]
    for index, op in enumerate(program.ops):
        if index in left_to_host or isinstance(op, Return):
            parts.append({})
        elif not isinstance(op, Alloc):
            parts[-1][index] = op
    return parts


def _is_worth_it(ops: Collection[Op], messages: bool) -> bool:
    """Whether a part may be a graph; of calls alone, the binder knows how much they do."""
    work = _work(ops)
    return work >= LEAST or any(isinstance(op, Call) for op in ops) or (work > 0 and not messages)


def _work(ops: Iterable[Op]) -> int:
    """The number of ops that the host would have to put on streams."""
    work = Call | Copy | Slice | Assemble | Communication | Constant
    return sum(
        isinstance(op, work) and not (isinstance(op, Assemble) and op.is_in_place) for op in ops
    )


def _reason(op: Op, module: Module, fabrics: Fabrics, hosts: set[Value]) -> str | None:
    """The reason why the host has to do an op, or None. `hosts`: futures of hosts' messages."""
    if isinstance(op, Call):
        if module.functions[op.fn.name].kind is FunctionKind.OPAQUE:
            return f"{op.fn} is opaque"
        return f"{op.fn} draws random numbers" if op.key is not None else None
    if isinstance(op, Communication):
        channel = module.channels.get(op.chan if op.chan is not None else -1)
        if channel is None or (channel.via is not None and fabrics.knows(channel.via)):
            return None
        hosts.update(op.results)
        return f"channel {channel.id} goes from host to host"
    if isinstance(op, Wait) and op.operands[0] in hosts:
        return "a wait for a message from host to host"
    return None
