"""Split off the end of a program that waits for a last message, so that its rank can go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...ir.attributes import MAIN, TAIL
from ...ir.ops import Call, Collective, Op, Recv, Reserve, Send, Value, Wait, batch_of
from ...ir.ops.module import Module, Program
from ...ir.phases import Phase
from ...ir.text.diagnostics import IRError
from ..base import Pass
from ..check.check_deadlock import CheckDeadlock
from ..check.check_races import CheckRaces


@dataclass(frozen=True)
class SplitTails(Pass):
    """Split a program that a device runs as a whole into two graphs: the main part and its tail.

    The tail begins where the rank waits for a message and sends no more. It runs on a stream of its
    own, beside the next execution. So with several executions in flight, a rank of a pipeline
    computes the next one while the result of the last one comes back to it.

    The receives of the tail are posted at its beginning, and the rank's sends are awaited ahead of
    it. The result is checked for deadlocks and races again; if there were any, programs stay whole.
    They also stay whole if the tail would add to gradients, which the user reads between
    executions.

    In this example rank 0 gets a token back, and `capture` has made its program one graph:

    Before::

        %h = call(%x) {fn = @stage0.forward, graph = 0, stream = compute} : f32[4]
        %d = send(%h) {chan = 0, graph = 0, peer = 1, seq = 0, stream = send} : future<unit>
        %r = recv() {chan = 1, graph = 0, peer = 1, seq = 0, stream = recv} : future<f32[4]>
        %v = wait(%r) {graph = 0, stream = compute} : f32[4]
        %u = call(%v) {fn = @token.set, graph = 0, stream = compute} : unit
        wait(%d) {graph = 0, stream = compute}

    After::

        %h = call(%x) {fn = @stage0.forward, graph = 0, stream = compute} : f32[4]
        %d = send(%h) {chan = 0, graph = 0, peer = 1, seq = 0, stream = send} : future<unit>
        wait(%d) {graph = 0, stream = compute}
        %r = recv() {chan = 1, graph = 1, peer = 1, seq = 0, stream = recv} : future<f32[4]>
        %v = wait(%r) {graph = 1, stream = compute} : f32[4]
        %u = call(%v) {fn = @token.set, graph = 1, stream = compute} : unit
    """

    name: ClassVar[str] = "split-tails"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.SCHEDULED,)
    optional: ClassVar[bool] = True

    def run(self, module: Module) -> bool:
        splits = {id(p): split for p in module.programs if (split := _split(module, p)) is not None}
        if not splits:
            return False
        before = {id(p): list(p.ops) for p in module.programs}
        for program in module.programs:
            if id(program) in splits:
                main, tail = splits[id(program)]
                program.ops[:] = [*main, *tail]
        if not _is_proved(module):
            for program in module.programs:
                program.ops[:] = before[id(program)]
            return False
        for _, tail in splits.values():
            for op in tail:
                op.graph = None if op.graph is None else TAIL
        return True


def _split(module: Module, program: Program) -> tuple[list[Op], list[Op]] | None:
    """The ops of a program ahead of its tail, and those of the tail; None if it has no tail."""
    ops = program.ops
    if any(isinstance(op, Send | Recv | Collective) and op.graph != MAIN for op in ops):
        return None  # the program does not run on the device as a whole
    makers = {op.result: op for op in ops if isinstance(op, Send | Recv | Collective)}
    begin = _begin(ops, makers)
    if begin is None or not any(isinstance(op, Call) for op in ops[:begin]):
        return None
    received = {op.operands[0] for op in ops[:begin] if isinstance(op, Wait)}
    awaited = {op.operands[0] for op in ops[begin:] if isinstance(op, Wait)}
    late = [op for op in ops[:begin] if isinstance(op, Recv) and op.result in awaited]
    first = ops.index(late[0])
    posted = [op for op in ops[first:begin] if isinstance(op, Recv)]
    if posted != late or not received.isdisjoint(awaited) or any(map(_is_bound, late)):
        return None  # a message would overtake another one, or be awaited twice
    if reserved(ops[:begin]) & {value for op in ops[begin:] for value in op.operands}:
        return None  # a tail reads copies of its inputs, so it cannot write to reserved storage
    sent = [op for op in ops[begin:] if isinstance(op, Wait) and _is_early(op, makers)]
    main = [*(op for op in ops[:begin] if op not in late), *sent]
    tail = [*late, *(op for op in ops[begin:] if op not in sent)]
    functions = module.functions
    called = [functions[op.fn.name] for op in tail if isinstance(op, Call)]
    return None if any(f.effect.is_on_gradients for f in called) else (main, tail)


def reserved(ops: Iterable[Op]) -> set[Value]:
    """The storage that ops reserve for tensors that are assembled in place."""
    return {value for op in ops if isinstance(op, Reserve) for value in op.results}


def _begin(ops: list[Op], makers: Mapping[Value, Op]) -> int | None:
    """The index of the first wait behind the rank's last send for a message not yet awaited."""
    last = max((i for i, op in enumerate(ops) if isinstance(op, Send | Collective)), default=-1)
    received: set[Value] = set()
    for index, op in enumerate(ops):
        if isinstance(op, Wait) and isinstance(makers.get(op.operands[0]), Recv):
            if index > last and op.operands[0] not in received:
                return index
            received.add(op.operands[0])
    return None


def _is_bound(op: Recv) -> bool:
    """True if a receive cannot be posted later, as it has a buffer or is in a batch."""
    return bool(op.operands) or batch_of(op) is not None


def _is_early(op: Wait, makers: Mapping[Value, Op]) -> bool:
    """True if a wait is for a send or collective, which the rank has begun ahead of the tail."""
    return isinstance(makers.get(op.operands[0]), Send | Collective)


def _is_proved(module: Module) -> bool:
    """True if the programs have neither deadlocks nor races."""
    try:
        CheckDeadlock().run(module)
        CheckRaces().run(module)
    except IRError:
        return False
    return True
