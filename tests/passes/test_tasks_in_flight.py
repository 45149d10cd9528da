"""Two tasks of a rank in flight: what travels meanwhile, what is held, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import pytest

from benchmarks.synthetic_groups import GroupSteps, group_module
from cg.ir.attributes import Action
from cg.ir.ops import Call, Collective, Op, RowCollective, Wait
from cg.ir.ops.clone import clone
from cg.ir.ops.module import Module, Program
from cg.ir.pipeline.costs import Costs, Link
from cg.ir.text.diagnostics import IRError
from cg.ir.types import tensor_bytes
from cg.ir.verify.verifier import verify
from cg.passes import schedules
from cg.passes.check.check_deadlock import CheckDeadlock
from cg.passes.check.check_races import CheckRaces
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline
from cg.passes.simulate.program_simulator import ProgramSimulation, simulate_programs

LINE = tuple(range(2))
HOMES = {
    "1f1b": LINE,
    "gpipe": LINE,
    "zb-h1": LINE,
    "zb-v": LINE + LINE[::-1],
    "interleaved": LINE * 2,
    "dualpipe-v": LINE + LINE[::-1],
}


@cache
def compiled(schedule: str, tasks: int) -> Module:
    """Six microbatches on two groups of two ranks, whose experts' rows are exchanged."""
    steps = GroupSteps(((1, 2),) * 2, HOMES[schedule], microbatches=6, experts=4)
    module = group_module(steps)
    pipeline = default_pipeline(
        schedules.by_name(schedule), dispatch="exchange", tasks_in_flight=tasks
    )
    PassManager(pipeline).run(module)
    return module


def simulated(module: Module) -> ProgramSimulation:
    """A forward takes 1 ms, and an exchange a sixth of it: as long as one of its calls."""
    groups = [channel.id for channel in module.channels.values() if channel.collective]
    links = dict.fromkeys(groups, Link(latency=1 / 6))
    return simulate_programs(module, Costs(channels=links, link=Link()))


def awaited(program: Program) -> Iterator[tuple[Collective, list[Op]]]:
    """The collectives of tasks, each with the ops from its start to the first wait for it."""
    for index, op in enumerate(program.ops):
        if isinstance(op, Collective) and op.task is not None:
            beside: list[Op] = []
            for later in program.ops[index + 1 :]:
                if isinstance(later, Wait) and later.operands[0] in op.results:
                    break
                beside.append(later)
            yield op, beside


def bytes_beside_calls(module: Module) -> int:
    """The bytes of collectives that travel while their rank computes for another task."""
    return sum(
        tensor_bytes(op.results[0].type)
        for program in module.programs
        for op, beside in awaited(program)
        if any(isinstance(each, Call) and each.task not in (None, op.task) for each in beside)
    )


SHORTER = {
    "1f1b": 0.95,
    "gpipe": 0.85,
    "zb-h1": 0.98,
    "zb-v": 0.9,
    "interleaved": 0.89,
    "dualpipe-v": 0.81,
}
"""The share of its time that a step takes with two tasks in flight."""


@pytest.mark.parametrize("schedule", HOMES)
def test_exchanges_travel_while_another_task_computes(schedule: str) -> None:
    """The same messages travel, ranks wait less for them, and the step takes as said."""
    row, overlapped = compiled(schedule, 1), compiled(schedule, 2)
    assert messages(row) == messages(overlapped)
    everything = sum(tensor_bytes(op.results[0].type) for p in row.programs for op, _ in awaited(p))
    assert bytes_beside_calls(overlapped) - bytes_beside_calls(row) > everything / 5
    before, after = simulated(row), simulated(overlapped)
    assert after.exposed_ratio < 0.8 * before.exposed_ratio
    assert after.makespan < SHORTER[schedule] * before.makespan


def messages(module: Module) -> Counter[tuple[object, ...]]:
    """How many collectives of each kind, task and type each rank has."""
    return Counter(
        (program.rank, op.opcode, str(op.task), op.mb, str(op.results[0].type))
        for program in module.programs
        for op in program.ops
        if isinstance(op, Collective)
    )


@pytest.mark.parametrize("schedule", HOMES)
def test_a_rank_holds_one_more_microbatch_at_most(schedule: str) -> None:
    row, overlapped = compiled(schedule, 1), compiled(schedule, 2)
    for one, other in zip(row.programs, overlapped.programs, strict=True):
        assert most_held(other) <= most_held(one) + 1


def most_held(program: Program) -> int:
    """The most forwards that have begun and whose backwards have not ended."""
    calls = [op for op in program.ops if isinstance(op, Call) and op.task is not None]
    last = {(op.task.stage, op.task.microbatch): i for i, op in enumerate(calls) if op.task}
    held: set[tuple[int, int]] = set()
    most = 0
    for index, op in enumerate(calls):
        assert op.task is not None
        part = (op.task.stage, op.task.microbatch)
        if op.task.action is Action.FORWARD:
            held.add(part)
        most = max(most, len(held))
        if last[part] == index:
            held.discard(part)
    return most


@pytest.mark.parametrize("schedule", HOMES)
def test_two_tasks_are_in_flight(schedule: str) -> None:
    for program in compiled(schedule, 2).programs:
        tasks = tasks_of_calls(program)
        last = {task: index for index, task in enumerate(tasks)}
        begun: set[str] = set()
        counts: Counter[int] = Counter()
        for index, task in enumerate(tasks):
            begun.add(task)
            counts[len(begun)] += 1
            if last[task] == index:
                begun.discard(task)
        assert set(counts) == {1, 2}


def tasks_of_calls(program: Program) -> list[str]:
    return [str(op.task) for op in program.ops if isinstance(op, Call) and op.task is not None]


def check(module: Module) -> None:
    verify(module)
    CheckDeadlock().run(module)
    CheckRaces().run(module)


def test_ranks_that_exchange_in_different_orders_are_refused() -> None:
    """On one rank an exchange is started before an earlier one of another microbatch."""
    module = clone(compiled("gpipe", 2))
    check(module)
    program = module.programs[0]
    ops = list(program.ops)
    rows = [op for op in ops if isinstance(op, RowCollective)]
    count = 0
    for one, other in pairwise(rows):
        between = ops[ops.index(one) : ops.index(other) + 1]
        moving = needed(between)
        if not alike(one, other) or one in moving:
            continue
        at = ops.index(one)
        stays = [op for op in ops[at:] if op not in moving]
        program.ops[:] = [*ops[:at], *moving, *stays]
        number(program)
        with pytest.raises(IRError, match="do not agree on collective"):
            check(module)
        program.ops[:] = ops
        number(program)
        count += 1
    check(module)
    assert count >= 8


def needed(ops: list[Op]) -> list[Op]:
    """The ops that the last one needs, and itself, in order."""
    wanted = [ops[-1]]
    for op in reversed(ops[:-1]):
        if any(value in each.operands for each in wanted for value in op.results):
            wanted.insert(0, op)
    return wanted


def alike(one: RowCollective, other: RowCollective) -> bool:
    """True if nothing but the microbatch tells two exchanges apart."""
    types = [[str(value.type) for value in (*op.operands, *op.results)] for op in (one, other)]
    return type(one) is type(other) and one.mb != other.mb and types[0] == types[1]


def number(program: Program) -> None:
    """Number the collectives of each channel in the order of the program."""
    numbers: Counter[int | None] = Counter()
    for op in program.ops:
        if isinstance(op, Collective):
            op.seq = numbers[op.chan]
            numbers[op.chan] += 1


def test_each_wait_for_an_exchange_is_needed() -> None:
    """Where a wait is left out, what it gives is not there, or its storage is given back early."""
    module = clone(compiled("gpipe", 2))
    program = module.programs[0]
    futures = {op.result: op for op in program.ops if isinstance(op, RowCollective)}
    waits = [op for op in program.ops if isinstance(op, Wait) and op.operands[0] in futures]
    assert len(waits) == len(futures)
    for wait in waits:
        index = program.ops.index(wait)
        del program.ops[index]
        with pytest.raises(IRError):
            check(module)
        program.ops.insert(index, wait)
    check(module)


def test_a_rank_of_one_call_a_task_has_the_same_order() -> None:
    """Without exchanges a task does not wait, so no other begins."""
    programs = []
    for tasks in (1, 2):
        module = group_module(GroupSteps(((1, 1),) * 4, microbatches=8))
        pipeline = default_pipeline(tasks_in_flight=tasks)
        PassManager(pipeline).run(module)
        programs.append([tasks_of_calls(program) for program in module.programs])
    assert programs[0] == programs[1]
