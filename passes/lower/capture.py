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
    CopyStart,
    Free,
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
"""The least number of ops worth a graph. A single call is enough, as it may be a whole model."""

_KINDS = {"recv": "receive", "copy_start": "copy"}
"""Words for ops that go on beside others, by opcode."""

_GIVEN_BACK = "the memory of a message from host to host is given back"


@dataclass(frozen=True)
class Capture(Pass):
    """Number the longest runs of ops that a device can do without the host.

    The host is needed for opaque methods, for random numbers and for messages between hosts, whose
    memory it gives back behind the run.
    Receives that are under way meanwhile are not part of a graph. All ops between two such places
    are one graph, which a single launch puts on the device from the third execution on.

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
        driven: whether one rank starts the executions of the programs. Hosts then announce messages
            between devices, one by one, so a graph has only the computation between messages. The
            exception is that each program is a single graph: then ranks agree to run them before
            any rank does, nothing can fail on a host, and no message is announced.
        rendezvous: as in `Fabrics`; messages of such a transport keep the order of their stream,
            inside of graphs and outside.
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
                changed = _free_late(module, program, fabrics, messages) or changed
                changed = _number(module, program, fabrics, messages) or changed
        return changed


def _cuts(
    module: Module, program: Program, fabrics: Fabrics, messages: bool = True
) -> dict[int, str]:
    """The ops that the host has to do, by index in order, each with the reason in words.

    They keep a rank's program from being one graph.
    """
    reasons = _of_hosts(module, program, fabrics, messages)
    in_turn = {id_ for id_, channel in module.channels.items() if fabrics.is_one_by_one(channel)}
    while True:
        crossing = _crossing(module, program, reasons)
        outside = reasons.keys() | crossing.keys() | _too_little(program, reasons)
        crossing = crossing | _overtaking(program, outside, in_turn)
        if not crossing:
            break
        reasons.update(crossing)
    return dict(sorted(reasons.items()))


def _of_hosts(module: Module, program: Program, fabrics: Fabrics, messages: bool) -> dict[int, str]:
    """The ops that the host has to do by themselves, by index, with the reason."""
    storage = SharedStorage(program, module.functions)
    hosts: set[Value] = set()
    received: set[Value] = set()
    reasons: dict[int, str] = {}
    for index, op in enumerate(program.ops):
        reason = _reason(op, module, fabrics, hosts)
        if isinstance(op, Wait) and reason is not None:
            received.update(map(storage.of, op.results))
        elif isinstance(op, Free) and storage.of(op.operands[0]) in received:
            reason = _GIVEN_BACK
        if not messages and isinstance(op, Communication | Wait):
            reason = "messages are announced"
        if reason is not None:
            reasons[index] = reason
    return reasons


def _free_late(module: Module, program: Program, fabrics: Fabrics, messages: bool) -> bool:
    """Let hosts give back memory of messages behind the ops that need no host, not among them."""
    reasons = _of_hosts(module, program, fabrics, messages)
    ops: list[Op] = []
    frees: list[Op] = []
    for index, op in enumerate(program.ops):
        if reasons.get(index) == _GIVEN_BACK:
            frees.append(op)
            continue
        if index in reasons or isinstance(op, Return):
            ops += frees
            frees.clear()
        ops.append(op)
    changed = ops != program.ops
    program.ops[:] = ops
    return changed


def _needs_no_host(module: Module, fabrics: Fabrics) -> bool:
    """True if each rank's device can do all of its program in one go."""
    if any(map(fabrics.is_one_by_one, module.channels.values())):
        return False  # their operations share one order with those that hosts announce
    for program in module.programs:
        if all(isinstance(op, Return) for op in program.ops):
            continue
        if (
            fabrics.of_rank(program.rank or 0) is None
            or _cuts(module, program, fabrics)
            or _too_little(program, ())
        ):
            return False
    return True


def _crossing(module: Module, program: Program, reasons: Mapping[int, str]) -> dict[int, str]:
    """Find receives and collectives that are posted in one part and awaited in another.

    A graph ends once all that it has begun has ended. So it does not contain a message that goes on
    while the host works, nor the wait for that message.

    Args:
        module: the module of the program.
        program: the program.
        reasons: the ops that are left to the host so far, by index, with the reason.

    Returns:
        More ops to leave to the host, in the same form.
    """
    parts = _part_numbers(program, reasons)
    posted: dict[Value, int] = {}
    crossing: dict[int, str] = {}
    for index, op in enumerate(program.ops):
        if isinstance(op, Recv | Collective | CopyStart):
            posted[op.result] = index
        elif isinstance(op, Wait):
            at = posted.pop(op.operands[0], None)
            if at is not None and at not in reasons and parts[at] != parts[index]:
                kind = _KINDS.get(program.ops[at].opcode, "collective")
                crossing[at] = f"a {kind} that goes on beside what the host does"
            if at is not None and index not in reasons and (at in reasons or at in crossing):
                crossing[index] = "a wait for what goes on beside that"
    crossing |= _torn(program, reasons, parts)
    crossing |= _resting(module, program, reasons, parts)
    return crossing | _mates(program, reasons.keys() | crossing.keys())


def _part_numbers(program: Program, reasons: Mapping[int, str]) -> list[int]:
    """For each op the number of its part, between the ops that are left to the host."""
    parts: list[int] = []
    part = 0
    for index in range(len(program.ops)):
        part += index in reasons
        parts.append(part)
    return parts


def _torn(program: Program, reasons: Mapping[int, str], parts: Sequence[int]) -> dict[int, str]:
    """Find tensors that are assembled in place, but not within one part.

    The inputs of a graph are copied into its memory, and its outputs are copied out. So a buffer
    would no longer be a part of its whole.
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


def _resting(
    module: Module, program: Program, reasons: Mapping[int, str], parts: Sequence[int]
) -> dict[int, str]:
    """Find tensors that go to the host in one part and come back in another.

    A graph copies all that it reads from outside into its memory, which is that of the device. A
    parameter at rest stays where it is, so a graph may copy from there.
    """
    functions = module.functions
    at_rest = {
        op.results[0]: index
        for index, op in enumerate(program.ops)
        if isinstance(op, Call) and functions[op.fn.name].kind is FunctionKind.HOST
        if functions[op.fn.name].parameter is not None
    }
    waits = {op.result: op.operands[0] for op in program.ops if isinstance(op, Wait) and op.results}
    sent = {op.result: i for i, op in enumerate(program.ops) if isinstance(op, CopyStart)}
    apart: dict[int, str] = {}
    for index, op in enumerate(program.ops):
        if isinstance(op, CopyStart) and not op.is_to_host:
            source = op.operands[0]
            while source in waits and source not in sent:  # a wait brings it to another stream
                source = waits[source]
            read = at_rest.get(source)
            if read is not None:
                if index in reasons or parts[read] != parts[index]:
                    apart |= dict.fromkeys(
                        (read, index), "a parameter that comes to what the host does"
                    )
                continue
            if source not in sent:
                apart[index] = "a copy of state that rests on the host"
                continue
            out = sent[source]
            if parts[out] != parts[index] or out in reasons or index in reasons:
                apart |= dict.fromkeys(
                    (out, index), "a tensor that rests beside what the host does"
                )
    return {index: reason for index, reason in apart.items() if index not in reasons}


def _overtaking(program: Program, left: Collection[int], in_turn: Set[int]) -> dict[int, str]:
    """Find messages of graphs that could overtake a message of their stream posted outside.

    A graph has branches of its own instead of the device's streams. When it begins, its branches
    wait only for the work that the compute stream has waited for.
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
    """The ops in parts that are not worth a graph."""
    parts = _parts(program, left)
    return {index for part in parts if _work(part.values()) < LEAST for index in part}


def _mates(program: Program, left: Set[int]) -> dict[int, str]:
    """The other ops of batches that have an op left to the host, with the reason."""
    batches = {index: batch_of(op) for index, op in enumerate(program.ops)}
    torn = {batches[index] for index in left} - {None}
    return {
        index: "a message in a batch with such a one"
        for index, batch in batches.items()
        if batch in torn and index not in left
    }


def describe(module: Module, fabrics: Fabrics, messages: bool = True) -> str:
    """A text with the graphs of each rank's program, and the reasons for its cuts."""
    lines = []
    for program in module.programs:
        if fabrics.of_rank(program.rank or 0) is None:
            lines.append(f"rank {program.rank}: no device")
            continue
        if not _work(program.ops):
            lines.append(f"rank {program.rank}: nothing to do")
            continue
        graphs = {op.graph for op in program.ops if op.graph is not None}
        cuts = _cuts(module, program, fabrics, messages)
        summary = f"{len(graphs)} graphs"
        if not cuts and graphs == {MAIN}:
            summary = "one graph, the whole program"
        elif not cuts and messages and graphs == {MAIN, TAIL}:
            summary = "one graph and its tail, the whole program"
        lines.append(f"rank {program.rank}: {summary}")
        lines += _counted("cut", cuts.values())
        lines += _counted("left out", _left_out(program, cuts, messages))
    return "\n".join(lines) + "\n"


def _counted(label: str, reasons: Iterable[str]) -> list[str]:
    return [f"  {label} {count} times: {reason}" for reason, count in Counter(reasons).items()]


def _left_out(program: Program, left_to_host: Collection[int], messages: bool) -> list[str]:
    """For each part between cuts that is no graph, the reason."""
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
    left_to_host = _cuts(module, program, fabrics, messages)
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
    """The parts of a program between the ops that are left to the host: ops by index."""
    parts: list[dict[int, Op]] = [{}]
    for index, op in enumerate(program.ops):
        if index in left_to_host or isinstance(op, Return):
            parts.append({})
        elif not isinstance(op, Alloc):
            parts[-1][index] = op
    return parts


def _is_worth_it(ops: Collection[Op], messages: bool) -> bool:
    """True if a part may be a graph; the binder knows how much the calls of a part do."""
    work = _work(ops)
    return work >= LEAST or any(isinstance(op, Call) for op in ops) or (work > 0 and not messages)


def _work(ops: Iterable[Op]) -> int:
    """The number of ops that the host would put on streams one by one."""
    work = Call | Copy | CopyStart | Slice | Assemble | Communication | Constant
    return sum(
        isinstance(op, work) and not (isinstance(op, Assemble) and op.is_in_place) for op in ops
    )


def _reason(op: Op, module: Module, fabrics: Fabrics, hosts: set[Value]) -> str | None:
    """The reason why the host has to do an op, or None.

    Args:
        op: the next op of the program.
        module: its module.
        fabrics: the fabrics of its ranks.
        hosts: the futures of messages between hosts so far; those of `op` are added.
    """
    if isinstance(op, Call):
        function = module.functions[op.fn.name]
        if function.kind is FunctionKind.OPAQUE:
            return f"{op.fn} is opaque"
        if function.kind is FunctionKind.HOST and function.parameter is None:
            return f"{op.fn} hands over memory of the host"
        return f"{op.fn} draws random numbers" if op.key is not None else None
    if isinstance(op, Communication):
        channel = module.channels.get(op.chan if op.chan is not None else -1)
        if channel is None or (channel.via is not None and fabrics.knows(channel.via)):
            return None
        hosts.update(op.results)
        return f"channel {channel.id} goes from host to host"
    if isinstance(op, CopyStart) and op.memory is not None:
        hosts.update(op.results)
        return "a copy to memory of an actor, whose end the host awaits"
    if isinstance(op, Wait) and op.operands[0] in hosts:
        return "a wait of the host"
    return None
