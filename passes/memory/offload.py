"""Copy tensors that rest to the memory of the host, and back before they are used."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...ir.alike.alike_programs import representatives_of
from ...ir.ops import CopyStart, Op, Value, Wait
from ...ir.ops.module import Module, Program
from ...ir.ops.names import Names
from ...ir.phases import Phase
from ...ir.pipeline.costs import Costs
from ...ir.text.diagnostics import error
from ...ir.types import FutureType, MemorySpace, TensorType
from ..base import Pass
from ..placement.fabrics import Fabrics
from .resting_values import ProgramClock, RestingValue, calls_within, resting_values, wanted

HIDDEN = 8
"""The amount that moves all tensors whose copies are done while they rest."""

ALL = 16
"""The amount that moves all tensors that rest."""


@dataclass(frozen=True)
class Offload(Pass):
    """Move tensors that nothing uses for a while to the host, on ranks with a device.

    A copy to the host starts behind the last use, and the wait for it stands where the link is
    expected to be done: behind it the tensor's memory is free. The copy back starts as late as the
    link allows, and the wait for it stands at the next use. Both directions have a queue each, in
    the order of the program. Values that `cg.offload` has marked move in any case, if a call runs
    while they rest. Of the others, those move first that rest longest.

    Before::

        %y, %s = call(%x) {fn = @a.fwd} : f32[8], f32[64]
        %z = call(%y) {fn = @b.f} : f32[8]
        %g = call(%s, %z) {fn = @a.bwd} : f32[8]

    After, with `amounts = 16`::

        %y, %s = call(%x) {fn = @a.fwd} : f32[8], f32[64]
        %s.offload = copy_start(%s) : future<f32[64]:host>
        %s.host = wait(%s.offload) : f32[64]:host
        %z = call(%y) {fn = @b.f} : f32[8]
        %s.fetch = copy_start(%s.host) : future<f32[64]>
        %s.back = wait(%s.fetch) : f32[64]
        %g = call(%s.back, %z) {fn = @a.bwd} : f32[8]

    Attributes:
        ranks: as in `Fabrics`; a rank without a device has no other memory to move to.
        amounts: for each rank how much moves, with `+` between ranks; from 0, nothing but what is
            marked, by `HIDDEN`, all whose copies are done while they rest, to `ALL`. Empty: 0.
        driven: whether one rank starts the executions; such programs move nothing.
        costs: the times of functions, and the link to the host.
    """

    ranks: str = ""
    amounts: str = ""
    driven: bool = False
    costs: Costs = field(default_factory=Costs)

    name: ClassVar[str] = "offload"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.SCHEDULED,)
    optional: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if any(not 0 <= amount <= ALL for amount in self._amounts()):
            raise ValueError(f"amounts are from 0 to {ALL}, not {self.amounts}")

    def _amounts(self) -> list[int]:
        return [int(text) for text in self.amounts.split("+")] if self.amounts else []

    def run(self, module: Module) -> bool:
        fabrics, amounts = Fabrics(self.ranks), self._amounts()
        changed = False
        if not any(amounts) and not _has_wanted(module):
            return False
        for program in module.programs:
            rank = program.rank or 0
            amount = amounts[rank] if rank < len(amounts) else 0
            is_wanted = any(wanted(op, module.functions) for op in program.ops)
            if not amount and not is_wanted:
                continue
            if self.driven or fabrics.of_rank(rank) is None:
                _refuse(module, program, self.driven)
                continue
            clock = ProgramClock.of(program, module.functions, self.costs)
            rests = resting_values(program, module.functions, clock)
            moves = choose_moves(rests, clock, self.costs, amount)
            _move(program, moves)
            changed = changed or bool(moves)
        return changed

    def remarks(self, module: Module) -> tuple[str, ...]:
        count = 0
        if _has(module, lambda op: isinstance(op, CopyStart)):
            ops = (op for program in module.programs for op in program.ops)
            count = sum(isinstance(op, CopyStart) and op.is_to_host for op in ops)
        return (f"{count} tensors rest in the memory of hosts",) if count else ()

    def __str__(self) -> str:
        return str(replace(self, costs=Costs())) if self.costs != Costs() else Pass.__str__(self)


def _has(module: Module, is_meant: Callable[[Op], bool]) -> bool:
    """True if a program has an op that is meant; of those that are alike one is asked."""
    return any(is_meant(op) for p in representatives_of(module) for op in p.ops)


def _has_wanted(module: Module) -> bool:
    return _has(module, lambda op: any(True for _ in wanted(op, module.functions)))


def _refuse(module: Module, program: Program, driven: bool) -> None:
    """Raise if a value is marked by `cg.offload` where nothing moves."""
    reason = f"rank {program.rank} has no device: its tensors are in the memory of the host anyway"
    remedy = "give the rank a device (CG_DEVICE=fake rehearses one)"
    if driven:
        reason = "one rank starts the executions of the step, and its programs move nothing"
        remedy = "let all ranks run the step"
    for op in program.ops:
        for value in wanted(op, module.functions):
            raise error(
                f"cg.offload is given %{value.name}, and {reason}",
                op=op,
                program=program,
                help=f"{remedy}, leave the pass out by passes='-offload', or call cg.keep instead",
            )


@dataclass(frozen=True)
class HostMove:
    """A tensor that moves to the host and back.

    Attributes:
        rest: the tensor.
        freed: the index of the op ahead of which its memory is given back.
        fetched: the index of the op ahead of which the copy back starts.
    """

    rest: RestingValue
    freed: int
    fetched: int


def choose_moves(
    rests: Sequence[RestingValue], clock: ProgramClock, costs: Costs, amount: int
) -> list[HostMove]:
    """The tensors that move, in the order of their copies to the host.

    Args:
        rests: the tensors that may move.
        clock: of the program.
        costs: with the link to the host.
        amount: as in `Offload`.
    """
    marked = [rest for rest in rests if rest.is_wanted]
    others = sorted(
        (rest for rest in rests if not rest.is_wanted), key=lambda r: (-r.time, r.before)
    )
    hidden = _most_hidden(marked, others, clock, costs) if amount else 0
    if amount <= HIDDEN:
        count = -(-hidden * amount // HIDDEN)
    else:
        count = hidden + -(-(len(others) - hidden) * (amount - HIDDEN) // (ALL - HIDDEN))
    moves = _placed([*marked, *others[:count]], clock, costs)
    return [move for move, _ in moves]


def _most_hidden(
    marked: Sequence[RestingValue],
    others: Sequence[RestingValue],
    clock: ProgramClock,
    costs: Costs,
) -> int:
    """How many of the others may move so that the copies of none are late, by bisection."""
    low, high = 0, len(others)
    while low < high:
        middle = (low + high + 1) // 2
        placed = _placed([*marked, *others[:middle]], clock, costs)
        if all(is_hidden or move.rest.is_wanted for move, is_hidden in placed):
            low = middle
        else:
            high = middle - 1
    return low


def _placed(
    rests: Sequence[RestingValue], clock: ProgramClock, costs: Costs
) -> list[tuple[HostMove, bool]]:
    """Where the copies of tensors begin and end, and whether they are done while it rests."""
    outward = sorted(rests, key=lambda rest: (rest.before, rest.after))
    there: dict[RestingValue, float] = {}
    free = 0.0
    for rest in outward:
        free = max(free, clock.end(rest.before)) + _copy_time(rest, costs)
        there[rest] = free
    begun: dict[RestingValue, float] = {}
    limit = clock.starts[-1]
    for rest in sorted(rests, key=lambda rest: (rest.after, rest.before), reverse=True):
        limit = min(limit, clock.starts[rest.after]) - _copy_time(rest, costs)
        begun[rest] = limit
    return [_place(rest, there[rest], begun[rest], clock) for rest in outward]


def _copy_time(rest: RestingValue, costs: Costs) -> float:
    """The milliseconds of a tensor's copies in one direction."""
    more = (len(rest.values) - 1) * costs.host.latency
    return costs.host.time(rest.size) + more


def _place(
    rest: RestingValue, there: float, begun: float, clock: ProgramClock
) -> tuple[HostMove, bool]:
    """The move of a tensor that is on the host from one time, and comes back from another on.

    At least one call runs between the two copies, also where that call then waits for them.
    """
    calls = calls_within(rest, clock)
    freed = bisect_left(clock.starts, there, rest.before + 1, rest.after)
    fetched = bisect_right(clock.starts, begun, rest.before + 1, rest.after + 1) - 1
    is_hidden = there <= begun and any(freed <= call < fetched for call in calls)
    if not is_hidden:
        freed = min(freed, calls[-1])
        first = next(call for call in calls if call >= freed)
        fetched = max(fetched, first + 1)
    return HostMove(rest, freed, fetched), is_hidden


def _move(program: Program, moves: Sequence[HostMove]) -> None:
    """Put the copies of moves into a program, and let the ops behind take what comes back."""
    names = Names.of(program)
    behind: defaultdict[int, list[Op]] = defaultdict(list)
    ahead: defaultdict[int, list[Op]] = defaultdict(list)
    back: dict[Value, tuple[int, Value]] = {}
    pairs = [(move, value) for move in moves for value in move.rest.values]
    on_host: dict[Value, Value] = {}
    for move, value in pairs:
        start, host, wait = _copies(value, "offload", "host", program.ops[move.rest.before], names)
        on_host[value] = host
        behind[move.rest.before].append(start)
        ahead[move.freed].append(wait)
    for move, value in sorted(pairs, key=lambda pair: (pair[0].rest.after, pair[0].rest.before)):
        start, there, wait = _copies(
            on_host[value], "fetch", "back", program.ops[move.rest.after], names, value.name
        )
        back[value] = move.rest.after, there
        ahead[move.fetched].append(start)
        ahead[move.rest.after].append(wait)
    ops: list[Op] = []
    for index, op in enumerate(program.ops):
        ops += ahead[index]
        _retarget(op, index, back)
        ops.append(op)
        ops += behind[index]
    program.ops[:] = ops


def _copies(
    value: Value, start_name: str, name: str, at: Op, names: Names, stem: str | None = None
) -> tuple[CopyStart, Value, Wait]:
    """The start of a copy to the other memory, what it gives, and the wait for it."""
    assert isinstance(value.type, TensorType), "only tensors move"
    is_back = value.type.space is MemorySpace.HOST
    space = MemorySpace.DEVICE if is_back else MemorySpace.HOST
    type_ = replace(value.type, space=space)
    stem = value.name if stem is None else stem
    future = Value(names.fresh(f"{stem}.{start_name}"), FutureType(type_))
    result = Value(names.fresh(f"{stem}.{name}"), type_)
    start = CopyStart((value,), (future,), loc=at.loc, mb=at.mb, task=at.task)
    return start, result, Wait((future,), (result,), loc=at.loc, mb=at.mb, task=at.task)


def _retarget(op: Op, index: int, back: Mapping[Value, tuple[int, Value]]) -> None:
    """Let an op take what has come back, if it stands behind that."""
    if any(value in back for value in op.operands):
        op.operands = tuple(
            back[value][1] if value in back and index >= back[value][0] else value
            for value in op.operands
        )
