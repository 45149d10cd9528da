"""Bring state of actors that rests on the host to the device, and back behind its use."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...ir.attributes import Symbol
from ...ir.ops import Call, CopyStart, Op, Value, Wait
from ...ir.ops.host_state import HostState
from ...ir.ops.module import Module, Program
from ...ir.ops.names import Names
from ...ir.phases import Phase
from ...ir.pipeline.costs import Costs
from ...ir.text.diagnostics import error
from ...ir.types import FutureType, ValueType
from ..base import Pass
from ..placement.fabrics import Fabrics
from .resting_values import ProgramClock


@dataclass(frozen=True)
class RestState(Pass):
    """Copy what `store="host"` keeps on the host to the device around the calls that may use it.

    These are the opaque methods of an actor, such as an update by an optimizer. Its copy to the
    device starts as late as the link allows, but not before the use of state ahead of the last one.
    The copy back starts behind the call, and is waited for when the link should be done, but no
    later than behind the next use. So a device holds the state of three actors at most: one comes,
    one is used, and one goes.

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

    Attributes:
        ranks: as in `Fabrics`; on a rank without a device nothing moves.
        driven: whether one rank starts the executions; such programs are refused.
        costs: the times of functions, and the link to the host.
    """

    ranks: str = ""
    driven: bool = False
    costs: Costs = field(default_factory=Costs)

    name: ClassVar[str] = "rest-state"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.SCHEDULED,)

    def run(self, module: Module) -> bool:
        fabrics = Fabrics(self.ranks)
        changed = False
        for program in module.programs:
            if fabrics.of_rank(program.rank or 0) is None:
                continue
            uses = _uses(module, program, self.costs)
            if uses and self.driven:
                raise error(
                    "state of the actor rests on the host, and one rank starts the executions of "
                    "the step, whose programs move nothing",
                    op=program.ops[uses[0].at],
                    program=program,
                    help='let all ranks run the step, or leave store="host" out',
                )
            if uses:
                _insert(module, program, uses)
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


def _uses(module: Module, program: Program, costs: Costs) -> list[_StateUse]:
    """The uses of a program, with the places of their copies."""
    clock = ProgramClock.of(program, module.functions, costs)
    end = len(program.ops) - 1
    uses: list[_StateUse] = []
    for at, op in enumerate(program.ops):
        function = module.functions[op.fn.name] if isinstance(op, Call) else None
        if function is None or not function.resting or function.actor is None:
            continue
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


def _insert(module: Module, program: Program, uses: Sequence[_StateUse]) -> None:
    """Put the copies, and what hands the state over, into a program."""
    names = Names.of(program)
    settling: defaultdict[int, list[Op]] = defaultdict(list)
    fetching: defaultdict[int, list[Op]] = defaultdict(list)
    entering: defaultdict[int, list[Op]] = defaultdict(list)
    leaving: defaultdict[int, list[Op]] = defaultdict(list)
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
        settling[use.settled] += there, maker.call(functions.settle, "settled", there.result)
        fetching[use.fetched] += rest, fetch
        entering[use.at] += here, enter
        leaving[use.at] += leave, back
    ops: list[Op] = []
    for index, op in enumerate(program.ops):
        ops += (*settling[index], *fetching[index], *entering[index], op, *leaving[index])
    program.ops[:] = ops


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

    def wait(self, name: str, copy: CopyStart) -> Wait:
        future, at = copy.result, self.at
        assert isinstance(future.type, FutureType), "a copy gives a future"
        result = self._value(name, future.type.value)
        return Wait((future,), (result,), loc=at.loc, mb=at.mb, task=at.task)

    def _value(self, name: str, type_: ValueType | FutureType) -> Value:
        return Value(self.names.fresh(f"{self.stem}.{name}"), type_)
