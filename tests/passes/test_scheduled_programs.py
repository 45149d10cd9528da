"""From ASYNC to checked programs: what every random pipelined step keeps on the way."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from cg.ir.clone import clone
from cg.ir.communication import Progress
from cg.ir.diagnostics import IRError
from cg.ir.module import Module
from cg.ir.ops import Call, Collective, Free, Op, Recv, Return, Send, Wait
from cg.ir.parser import parse_module
from cg.ir.printer import format_module
from cg.ir.verifier import verify
from cg.passes import schedules
from cg.passes.manager import PassManager
from cg.passes.registry import parse_pipeline
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from .random_pipelines import Drawn, Machine, Maker, World, drawn_steps, run_async

FRONT = "dce,assign-stages,differentiate,cse,place,dce,insert-transfers,split-transfers"
BACKS = [
    "schedule{schedule=%s},check-deadlock",
    "schedule{schedule=%s},overlap,assign-streams,plan-buffers,check-types,check-deadlock",
    "schedule{schedule=%s},plan-buffers,check-types,check-deadlock",
    "schedule{schedule=%s},overlap{lookahead=1},plan-buffers,assign-streams,check-deadlock",
    "schedule{schedule=%s},assign-streams,overlap{lookahead=4},plan-buffers,check-deadlock",
]
SCHEDULES = [schedules.gpipe().name, schedules.one_f_one_b().name]


def compile_step(drawn: Drawn, back: str) -> tuple[Module, Module]:
    """The module in phase ASYNC, and what the passes of `back` make of it."""
    module = Maker(drawn).make()
    PassManager(parse_pipeline(FRONT)).run(module)
    before = clone(module)
    try:
        PassManager(parse_pipeline(back), check=True).run(module)
    except IRError as error:
        # An opaque method keeps its order to the backwards on its actor, so none can start before
        # the last forward.
        assert drawn.opaque is not None and "schedule '1f1b' cannot run this step" in str(error)
        module = clone(before)
        back = back.replace("schedule=1f1b", "schedule=gpipe")
        PassManager(parse_pipeline(back), check=True).run(module)
    return before, module


def chooser(seed: int) -> Callable[[int], int]:
    return random.Random(seed).randrange


@pytest.mark.parametrize("back", BACKS)
@settings(max_examples=60, deadline=None)
@given(drawn=drawn_steps(), schedule=st.sampled_from(SCHEDULES), seed=st.integers(0, 99))
def test_programs_compute_what_the_step_does(
    back: str, drawn: Drawn, schedule: str, seed: int
) -> None:
    before, module = compile_step(drawn, back % schedule)
    assert parse_module(format_module(module)) == module
    world = World()
    expected = run_async(before, world)
    state = dict(world.written)
    world.written.clear()
    world.accumulated.clear()
    machine = Machine(module, world, chooser(seed))
    assert machine.run()
    assert machine.returned == expected
    assert world.written == state


@settings(max_examples=60, deadline=None)
@given(drawn=drawn_steps(), schedule=st.sampled_from(SCHEDULES))
def test_every_rank_follows_its_schedule(drawn: Drawn, schedule: str) -> None:
    _, module = compile_step(drawn, f"schedule{{schedule={schedule}}},overlap")
    for program in module.programs:
        calls = [op for op in program.ops if isinstance(op, Call) and op.task is not None]
        tasks = [op.task for op in calls if module.functions[op.fn.name].actor is not None]
        seen = list(dict.fromkeys(tasks))
        # A task is not taken up again once another has begun.
        assert [t for i, t in enumerate(tasks) if i == 0 or t != tasks[i - 1]] == seen
        for stage in {task.stage for task in tasks}:
            for action in {task.action for task in tasks}:
                order = [t.microbatch for t in seen if (t.stage, t.action) == (stage, action)]
                assert order == sorted(order)


COMMUNICATION = (Send, Recv, Collective, Wait, Free)


def mutate(module: Module, rank: int, source: int, target: int, drop: bool) -> Op | None:
    """Move one communication op of a rank, or drop it; the op, or None if there is none."""
    ops = module.programs[rank].ops
    places = [i for i, op in enumerate(ops) if isinstance(op, COMMUNICATION)]
    if not places:
        return None
    op = ops.pop(places[source % len(places)])
    if not drop:
        ops.insert(target % len(ops), op)
    return op


@pytest.mark.parametrize("back", BACKS)
@settings(max_examples=100, deadline=None)
@given(
    drawn=drawn_steps(),
    moves=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 999), st.integers(0, 999), st.booleans()),
        min_size=1,
        max_size=3,
    ),
    seed=st.integers(0, 99),
)
def test_mutants_are_judged_as_by_brute_force(
    back: str, drawn: Drawn, moves: Sequence[tuple[int, int, int, bool]], seed: int
) -> None:
    drawn.microbatches = min(drawn.microbatches, 4)
    _, module = compile_step(drawn, back % "1f1b")
    for rank, source, target, drop in moves:
        mutate(module, rank % module.world, source, target, drop)
    try:
        verify(module)
    except IRError:
        assume(False)
    judge(module, seed)


def judge(module: Module, seed: int) -> None:
    """check-deadlock refuses a module exactly if brute force gets stuck in it."""
    try:
        finished = Machine(module, World(), chooser(seed)).run()
    except AssertionError:
        assume(False)  # a use after free: not what this checker is for
    try:
        PassManager(parse_pipeline("check-deadlock")).run(module)
        accepted = True
    except IRError as error:
        accepted = False
        assert "deadlock" in str(error) or "freed" in str(error) or "slot" in str(error)
    assert accepted == finished


@settings(max_examples=200, deadline=None)
@given(
    orders=st.lists(st.permutations(range(8)), min_size=2, max_size=2),
    streams=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_exchanges_are_judged_as_by_brute_force(
    orders: list[list[int]], streams: bool, seed: int
) -> None:
    """Two ranks that send two messages each to the other, in any order of posts and waits."""
    module = parse_module(exchange(orders, streams))
    try:
        verify(module)
    except IRError:
        assume(False)
    judge(module, seed)


def exchange(orders: Sequence[Sequence[int]], streams: bool) -> str:
    """Two programs of two sends, two receives and their waits, in the orders given."""
    lines = ["module @step phase=scheduled world=2 {"]
    lines += ["channel 0 {ranks = {0,1}}", "channel 1 {ranks = {1,0}}"]
    for rank, order in enumerate(orders):
        peer = 1 - rank
        ops = []
        for seq in range(2):
            on = [", stream = send", ", stream = recv"] if streams else ["", ""]
            ops += [
                f"%s{seq} = send(%x) {{chan = {rank}, peer = {peer}, seq = {seq}{on[0]}}} "
                ": future<unit>",
                f"wait(%s{seq})",
                f"%r{seq} = recv() {{chan = {peer}, peer = {peer}, seq = {seq}{on[1]}}} "
                ": future<f32[4]>",
                f"%v{seq} = wait(%r{seq}) : f32[4]",
            ]
        lines.append(f"program @{rank}(%x: f32[4]) {{")
        # A wait follows its post, and a channel's messages keep their order.
        lines += [ops[i] for i in posts_first(order)]
        lines += ["return()", "}"]
    return "\n".join([*lines, "}"])


def posts_first(order: Sequence[int]) -> list[int]:
    """The order, less what no program can have: each op waits for those that it has to follow."""
    after = {1: [0], 3: [2], 5: [4], 7: [6], 4: [0], 6: [2]}
    found: list[int] = []
    left = list(order)
    while left:
        ready = next(i for i in left if all(j in found for j in after.get(i, [])))
        left.remove(ready)
        found.append(ready)
    return found


@settings(max_examples=40, deadline=None)
@given(drawn=drawn_steps(), lookahead=st.integers(1, 3))
def test_overlap_keeps_its_bound_and_the_order_of_messages(drawn: Drawn, lookahead: int) -> None:
    _, module = compile_step(drawn, "schedule{schedule=1f1b}")
    before = [[op for op in p.ops if isinstance(op, Recv)] for p in module.programs]
    PassManager(parse_pipeline(f"overlap{{lookahead={lookahead}}}")).run(module)
    for program, receives in zip(module.programs, before, strict=True):
        assert [op for op in program.ops if isinstance(op, Recv)] == receives
        in_flight: dict[tuple[type, int], int] = {}
        chans = {}
        for op in program.ops:
            if isinstance(op, Send | Recv):
                key = type(op), op.chan
                chans[op.result] = key
                in_flight[key] = in_flight.get(key, 0) + 1
                assert in_flight[key] <= lookahead
            elif isinstance(op, Wait) and op.operands[0] in chans:
                in_flight[chans[op.operands[0]]] -= 1
        assert isinstance(program.ops[-1], Return)


@settings(max_examples=40, deadline=None)
@given(drawn=drawn_steps(), schedule=st.sampled_from(SCHEDULES))
def test_progress_takes_as_long_as_any_schedule_must(drawn: Drawn, schedule: str) -> None:
    back = f"schedule{{schedule={schedule}}},overlap"
    _, module = compile_step(drawn, back)

    def cost(op: Op) -> float:
        return 1.0 if isinstance(op, Call) else 0.0

    progress = Progress(module, cost)
    assert progress.run()
    work = [sum(cost(op) for op in program.ops) for program in module.programs]
    end = max(progress.clocks.values())
    assert max(work) <= end <= sum(work)
