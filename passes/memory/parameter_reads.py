"""Place the copies of parameters that rest on the host: as late as the link allows, in order."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from ...ir.ops import Call, Op, Value
from ...ir.ops.module import Module, Program
from ...ir.pipeline.costs import Costs
from .resting_values import ProgramClock


@dataclass
class ParameterRead:
    """A call that reads a parameter which rests on the host.

    Attributes:
        op: the call.
        at: its index.
        actor: the actor of the parameter.
        size: the bytes of the parameter.
        taken: the index of the op that takes the copy first, as one that makes its shape.
        used: the index of the op that works with the parameter first.
        earliest: the index from which on the host's memory has what it reads.
        fetched: the index of the op ahead of which the copy to the device starts.
    """

    op: Call
    at: int
    actor: str
    size: int
    taken: int
    used: int
    earliest: int = 0
    fetched: int = 0


def rests(module: Module, rank: int) -> bool:
    """True if parameters of a rank's program rest on the host."""
    calls = (op for op in module.program_of(rank).ops if isinstance(op, Call))
    return any(_hands_over(module, op) and module.functions[op.fn.name].resting for op in calls)


def parameter_reads(module: Module, program: Program) -> list[ParameterRead]:
    """The reads of a scheduled program, in the order of their uses."""
    first: dict[Value, int] = {}
    for index, op in enumerate(program.ops):
        for value in op.operands:
            first.setdefault(value, index)
    reads = []
    for index, op in enumerate(program.ops):
        function = module.functions[op.fn.name] if isinstance(op, Call) else None
        if function is None or function.parameter is None or not function.resting:
            continue
        assert isinstance(op, Call), "calls have functions"
        taken = used = first.get(op.result, index + 1)
        while _hands_over(module, program.ops[used]) and program.ops[used].result in first:
            used = first[program.ops[used].result]
        actor = function.actor or ""
        reads.append(ParameterRead(op, index, actor, function.resting, taken, used))
    return sorted(reads, key=lambda read: (read.used, read.at))


def _hands_over(module: Module, op: Op) -> bool:
    """True if an op only hands a parameter over."""
    return isinstance(op, Call) and module.functions[op.fn.name].parameter is not None


def place_reads(reads: list[ParameterRead], clock: ProgramClock, costs: Costs, window: int) -> None:
    """Choose where each copy starts.

    One queue copies them in the order of their uses, and each starts as late as lets all be there
    in time. But no copy starts before `window` other uses of parameters that stand ahead of its
    own: so a device holds those of `window + 1` uses at most.

    Args:
        reads: the reads, in the order of their uses.
        clock: of the program.
        costs: with the link to the host.
        window: see above.
    """
    uses = sorted({read.used for read in reads})
    number = {used: index for index, used in enumerate(uses)}
    free = clock.starts[-1]
    for read in reversed(reads):
        ahead = number[read.used] - window
        earliest = max(uses[ahead] if ahead >= 0 else 0, read.earliest)
        free = min(free, clock.starts[read.used]) - costs.host.time(read.size)
        late = bisect_right(clock.starts, free, 0, read.taken + 1) - 1
        read.fetched = min(max(late, earliest), read.taken)
