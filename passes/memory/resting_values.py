"""Find the tensors of a rank's program that nothing uses for a while: they could rest on its host.

The clock of a rank counts the time of its calls, measured or estimated, and no time in which it
waits for others. So it says how long a tensor rests at the least.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from ...ir.flops import WORK_OF_BYTE
from ...ir.ops import Call, Op, Return, Value, View
from ...ir.ops.module import Function, FunctionKind, Program
from ...ir.ops.storage import SharedStorage
from ...ir.pipeline.costs import Costs
from ...ir.types import TensorType, tensor_bytes


@dataclass(frozen=True)
class ProgramClock:
    """The times of a rank's program in milliseconds, if it never waits.

    Attributes:
        starts: the start of each op, and the end of the last.
        calls: the indices of the calls that take time.
    """

    starts: tuple[float, ...]
    calls: tuple[int, ...]

    @staticmethod
    def of(program: Program, functions: Mapping[str, Function], costs: Costs) -> ProgramClock:
        """The clock of a program, with the times of `costs.functions` where it has them."""
        times = [call_time(op, functions, costs) for op in program.ops]
        calls = tuple(index for index, time in enumerate(times) if time)
        return ProgramClock(tuple(accumulate(times, initial=0.0)), calls)

    def end(self, index: int) -> float:
        """The end of an op."""
        return self.starts[index + 1]


def call_time(op: Op, functions: Mapping[str, Function], costs: Costs) -> float:
    """The milliseconds of an op; estimated from its operations and bytes if none are measured."""
    if not isinstance(op, Call):
        return 0.0
    function = functions[op.fn.name]
    if function.parameter is not None:
        return 0.0
    measured = costs.functions.get(function.name)
    if measured is not None:
        return measured
    moved = sum(map(tensor_bytes, (*function.inputs, *function.outputs))) + function.workspace
    return costs.estimate(function.flops.total + WORK_OF_BYTE * moved)


@dataclass(frozen=True)
class RestingValue:
    """A tensor that nothing uses between two ops.

    Attributes:
        values: the values that are used behind the rest, each a view of the tensor or the whole.
        before, after: the indices of the last op ahead of the rest that uses it, and of the first
            behind.
        size: the bytes of `values`.
        time: of the rest, in milliseconds.
        is_wanted: whether the user wants it to be on the host meanwhile.
    """

    values: tuple[Value, ...]
    before: int
    after: int
    size: int
    time: float
    is_wanted: bool


@dataclass
class _GroupUses:
    """The values of one storage, and the ops that use it.

    Attributes:
        values: the values, each with the indices of ops that make or take it.
        is_own: whether the program may give the storage back and copy it: calls have made it, and
            nobody but traced functions and views gets it.
        is_wanted: whether the user wants a value of it to rest on the host.
    """

    values: dict[Value, list[int]] = field(default_factory=dict)
    is_own: bool = True
    is_wanted: bool = False

    def rest(self, program: Program, clock: ProgramClock) -> RestingValue | None:
        """The longest time for which nothing uses it; None if it has no such time, or may not."""
        indices = sorted({index for used in self.values.values() for index in used})
        if not self.is_own or len(indices) < 2:
            return None
        before, after = max(
            pairwise(indices), key=lambda pair: clock.starts[pair[1]] - clock.end(pair[0])
        )
        behind = indices[indices.index(after) :]
        if not all(isinstance(program.ops[index], Call) for index in behind):
            return None
        used = tuple(v for v, at in self.values.items() if at[-1] >= after)
        if any(at[0] >= after for at in self.values.values()):
            return None  # a call behind the rest gives the storage another name
        size = sum(tensor_bytes(value.type) for value in used)
        time = clock.starts[after] - clock.end(before)
        return RestingValue(used, before, after, size, time, self.is_wanted)


def resting_values(
    program: Program, functions: Mapping[str, Function], clock: ProgramClock
) -> list[RestingValue]:
    """The tensors of a scheduled program that could rest on the host while a call runs.

    Left out are tensors that the program is given or receives, and those that opaque methods or
    the caller get.

    Args:
        program: of one rank, before `plan-buffers`.
        functions: of its module.
        clock: of the program.
    """
    storage = SharedStorage(program, functions, collectives=True)
    groups: dict[Value, _GroupUses] = {}

    def group_of(value: Value) -> _GroupUses:
        return groups.setdefault(storage.of(value), _GroupUses())

    for value in program.params:
        group_of(value).is_own = False
    for index, op in enumerate(program.ops):
        is_made, is_taken = _is_made(op, functions), _is_taken(op, functions)
        for value in op.results:
            group = group_of(value)
            group.values[value] = [index]
            group.is_own &= is_made and isinstance(value.type, TensorType)
        for value in op.operands:
            group = group_of(value)
            group.values.setdefault(value, []).append(index)
            group.is_own &= is_taken
        for value in wanted(op, functions):
            group_of(value).is_wanted = True
    rests = (group.rest(program, clock) for group in groups.values())
    return [rest for rest in rests if rest is not None and calls_within(rest, clock)]


def wanted(op: Op, functions: Mapping[str, Function]) -> Iterable[Value]:
    """The results of an op that the user wants to rest on the host."""
    if not isinstance(op, Call):
        return ()
    return [op.results[index] for index in functions[op.fn.name].offloads]


def calls_within(rest: RestingValue, clock: ProgramClock) -> list[int]:
    """The indices of the calls that run while a tensor rests."""
    return [index for index in clock.calls if rest.before < index < rest.after]


def _is_made(op: Op, functions: Mapping[str, Function]) -> bool:
    """True if the results of an op are tensors of the program's own, or views of such."""
    if isinstance(op, Call):
        function = functions[op.fn.name]
        return function.kind is not FunctionKind.OPAQUE and function.parameter is None
    return isinstance(op, View)


def _is_taken(op: Op, functions: Mapping[str, Function]) -> bool:
    """True if an op neither keeps nor changes its operands, nor hands them on to the user."""
    if isinstance(op, Call):
        return functions[op.fn.name].kind is not FunctionKind.OPAQUE
    return isinstance(op, View) or (not isinstance(op, Return) and op.shared_operand is None)
