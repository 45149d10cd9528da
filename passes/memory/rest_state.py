"""Bring what rests on the host to the device, and back behind calls that may change it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...ir.attributes import Symbol
from ...ir.ops import Call, CopyStart, Op, Value, Wait
from ...ir.ops.host_state import HostState
from ...ir.ops.module import FunctionKind, Module, Program
from ...ir.ops.names import Names
from ...ir.phases import Phase
from ...ir.pipeline.costs import Costs
from ...ir.text.diagnostics import error
from ...ir.types import FutureType, MemorySpace, TensorType, ValueType
from ..base import Pass
from ..placement.fabrics import Fabrics
from .parameter_reads import ParameterRead, parameter_reads, place_reads
from .resting_values import ProgramClock


@dataclass(frozen=True)
class RestState(Pass):
    """Copy what `store="host"` keeps on the host to the device for the calls that use it.

    Opaque methods of an actor, such as an update by an optimizer, find all that they may change on
    the device. Its copy to the device starts as late as the link allows, but not before the use of
    state ahead of the last one. The copy back starts behind the call, and is waited for when the
    link should be done, but no later than behind the next use. So a device holds the state of three
    actors at most: one comes, one is used, and one goes.

    Before::

        %u = call() {fn = @a.update} : object

    After::

        %a.rest = call() {fn = @a.state.rest} : u8[64]:host
        %a.fetch = copy_start(%a.rest) : future<u8[64]>
        %a.here = wait(%a.fetch) : u8[64]
        %a.entered = call(%a.here) {fn = @a.state.enter} : unit
        %u = call() {fn = @a.update} : object
        %a.left = call(%a.here) {fn = @a.state.leave} : u8[64]
        %a.offload = copy_start(%a.left, %a.rest) : future<u8[64]:host>
        %a.there = wait(%a.offload) : u8[64]:host
        %a.settled = call(%a.there) {fn = @a.state.settle} : unit

    Traced functions take parameters as values, which calls read at rest. Such a call gives the
    memory of the host from here on, and a copy brings it to the device. That copy, too, starts as
    late as the link allows, but not before the `prefetch` uses ahead of its own.

    Before::

        %w.rest = call() {fn = @a.w.rest} : f32[8]
        %y = call(%w.rest, %x) {fn = @a.forward} : f32[8]

    After::

        %w.rest.host = call() {fn = @a.w.rest} : f32[8]:host
        %w.rest.fetch = copy_start(%w.rest.host) : future<f32[8]>
        %w.rest = wait(%w.rest.fetch) : f32[8]
        %y = call(%w.rest, %x) {fn = @a.forward} : f32[8]

    Attributes:
        ranks: as in `Fabrics`; on a rank without a device nothing moves.
        driven: whether one rank starts the executions; such programs are refused.
        prefetch: how many uses ahead of its own a parameter may be fetched.
        costs: the times of functions, and the link to the host.
    """

    ranks: str = ""
    driven: bool = False
    prefetch: int = 1
    costs: Costs = field(default_factory=Costs)

    name: ClassVar[str] = "rest-state"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.SCHEDULED,)

    def run(self, module: Module) -> bool:
        fabrics = Fabrics(self.ranks)
        changed = False
        if not self.ranks:
            return False
        for program in module.programs:
            if fabrics.of_rank(program.rank or 0) is None:
                continue
            clock = ProgramClock.of(program, module.functions, self.costs)
            uses = _uses(module, program, clock, self.costs)
            reads = parameter_reads(module, program)
            if self.driven and (uses or reads):
                raise error(
                    "state of the actor rests on the host, and one rank starts the executions of "
                    "the step, whose programs move nothing",
                    op=program.ops[min((*(use.at for use in uses), *(read.at for read in reads)))],
                    program=program,
                    help='let all ranks run the step, or leave store="host" out',
                )
            for read in reads:
                read.earliest = max((u.at + 1 for u in uses if _is_behind(read, u)), default=0)
            place_reads(reads, clock, self.costs, self.prefetch)
            for use in uses:  # the memory must be filled before a parameter is read there again
                behind = [read.fetched for read in reads if _is_behind(read, use)]
                use.settled = min((use.settled, *behind))
            if uses or reads:
                _insert(module, program, uses, reads)
                changed = True
        return changed

    def __str__(self) -> str:
        return str(replace(self, costs=Costs())) if self.costs != Costs() else Pass.__str__(self)


@dataclass
class _StateUse:
    """A call that may use state which rests on the host.

    Attributes:
        at: the index of the call.
        actor: the actor of the state.
        fetched: the index of the op ahead of which the copy to the device starts.
        settled: the index of the op ahead of which the copy back is over.
    """

    at: int
    actor: str
    fetched: int
    settled: int


def _is_behind(read: ParameterRead, use: _StateUse) -> bool:
    """True if a read has to find what a use has left."""
    return read.actor == use.actor and use.at < read.at


def _uses(module: Module, program: Program, clock: ProgramClock, costs: Costs) -> list[_StateUse]:
    """The uses of a program, with the places of their copies."""
    end = len(program.ops) - 1
    uses: list[_StateUse] = []
    for at, op in enumerate(program.ops):
        function = module.functions[op.fn.name] if isinstance(op, Call) else None
        if function is None or not function.resting or function.kind is not FunctionKind.OPAQUE:
            continue
        assert function.actor is not None, "state is an actor's"
        time = costs.host.time(function.resting)
        late = bisect_right(clock.starts, clock.starts[at] - time, 0, at + 1) - 1
        last = uses[-1] if uses else None
        fetched = max(late, 0 if last is None else last.at)
        if last is not None:
            last.settled = min(last.settled, at + 1)
        for other in uses:
            if other.actor == function.actor:  # its memory must be filled before it is read again
                other.settled = min(other.settled, at)
                fetched = at
        settled = bisect_left(clock.starts, clock.end(at) + time, at + 1, end)
        uses.append(_StateUse(at, function.actor, fetched, settled))
    return uses


def _insert(
    module: Module,
    program: Program,
    uses: Sequence[_StateUse],
    reads: Sequence[ParameterRead],
) -> None:
    """Put the copies, and what hands the state over, into a program."""
    names = Names.of(program)
    ahead: defaultdict[int, _Ahead] = defaultdict(_Ahead)
    for use in uses:
        op = program.ops[use.at]
        assert isinstance(op, Call), "a use is a call"
        functions = HostState.declare(module, module.functions[op.fn.name])
        maker = _Maker(module, names, op, use.actor)
        rest = maker.call(functions.rest, "rest")
        fetch = maker.copy("fetch", rest.result, module.functions[functions.enter].inputs[0])
        here = maker.wait("here", fetch)
        enter = maker.call(functions.enter, "entered", here.result)
        leave = maker.call(functions.leave, "left", here.result)
        kept = module.functions[functions.rest].outputs[0]
        back = maker.copy("offload", leave.result, kept, rest.result)
        there = maker.wait("there", back)
        ahead[use.settled].settling += there, maker.call(functions.settle, "settled", there.result)
        ahead[use.fetched].fetching += rest, fetch
        ahead[use.at].entering += here, enter
        ahead[use.at].leaving += leave, back
    for read in reads:
        function, result = module.functions[read.op.fn.name], read.op.result
        assert isinstance(result.type, TensorType), "a parameter is a tensor"
        there_type = replace(result.type, space=MemorySpace.HOST)
        module.functions[function.name] = replace(
            function, kind=FunctionKind.HOST, outputs=(there_type,)
        )
        maker = _Maker(module, names, read.op, result.name)
        rest = maker.call(function.name, "host")
        fetch = maker.copy("fetch", rest.result, result.type)
        ahead[read.fetched].fetching += rest, fetch
        ahead[read.taken].entering.append(maker.wait("here", fetch, result))
    replaced = {read.op for read in reads}
    ops: list[Op] = []
    for index, op in enumerate(program.ops):
        around = ahead[index]
        ops += (*around.settling, *around.fetching, *around.entering)
        ops += (*(() if op in replaced else (op,)), *around.leaving)
    program.ops[:] = ops


@dataclass
class _Ahead:
    """What comes around an op: all ahead of it, but for what is behind a use."""

    settling: list[Op] = field(default_factory=list)
    fetching: list[Op] = field(default_factory=list)
    entering: list[Op] = field(default_factory=list)
    leaving: list[Op] = field(default_factory=list)


@dataclass(frozen=True)
class _Maker:
    """Makes the ops around a call.

    Attributes:
        at: the call, of whose line, microbatch and task they are.
        stem: the beginning of the names of their values.
    """

    module: Module
    names: Names
    at: Call
    stem: str

    def call(self, function: str, name: str, *operands: Value) -> Call:
        (type_,) = self.module.functions[function].outputs
        at = self.at
        return Call(
            operands,
            (self._value(name, type_),),
            fn=Symbol(function),
            loc=at.loc,
            mb=at.mb,
            task=at.task,
        )

    def copy(self, name: str, value: Value, type_: ValueType, *into: Value) -> CopyStart:
        future, at = self._value(name, FutureType(type_)), self.at
        return CopyStart((value, *into), (future,), loc=at.loc, mb=at.mb, task=at.task)

    def wait(self, name: str, copy: CopyStart, result: Value | None = None) -> Wait:
        future, at = copy.result, self.at
        assert isinstance(future.type, FutureType), "a copy gives a future"
        if result is None:
            result = self._value(name, future.type.value)
        return Wait((future,), (result,), loc=at.loc, mb=at.mb, task=at.task)

    def _value(self, name: str, type_: ValueType | FutureType) -> Value:
        return Value(self.names.fresh(f"{self.stem}.{name}"), type_)
