"""From ASYNC to checked programs: what every random pipelined step keeps on the way."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cg.ir.ops import Call, Collective, Free, Op, Recv, RowCollective, Send, Wait
from cg.ir.ops.clone import clone
from cg.ir.ops.module import Module, Program
from cg.ir.text.diagnostics import IRError
from cg.ir.text.parser import parse_module
from cg.ir.text.printer import format_module
from cg.ir.verify.communication import Progress
from cg.ir.verify.verifier import verify
from cg.passes import schedules
from cg.passes.manager.manager import PassManager
from cg.passes.manager.registry import parse_pipeline

from ..properties.hosts import Hosts, refusal
from ..sampling import scaled
from ..text.test_text import FILES, read_cases
from .meanings import Machine, Meaning, World, run_async
from .random_pipelines import Drawn, Maker, drawn_steps

FRONT = "dce,assign-stages,differentiate,cse,place,dce,insert-transfers,split-transfers"
SPLIT = FRONT.replace("differentiate", "differentiate{split_backward=true}")
BACKS = [
    "schedule{schedule=%s},check-deadlock",
    "schedule{schedule=%s},overlap,assign-streams,plan-buffers,check-types,check-deadlock",
    "schedule{schedule=%s},plan-buffers,check-types,check-deadlock",
    "schedule{schedule=%s},overlap{lookahead=1},plan-buffers,assign-streams,check-deadlock",
    "schedule{schedule=%s},assign-streams,overlap{lookahead=4},plan-buffers,check-deadlock",
    "schedule{schedule=%s},overlap,batch-messages{rendezvous=hccl},assign-streams{rendezvous=hccl},"
    "plan-buffers,check-types,check-deadlock,check-races",
]
SCHEDULES = [schedules.gpipe().name, schedules.one_f_one_b().name, schedules.auto().name]


def compile_step(drawn: Drawn, back: str) -> tuple[Module, Module]:
    """The module in phase ASYNC, and what the passes of `back` make of it."""
    module = Maker(drawn).make()
    PassManager(parse_pipeline(SPLIT if "schedule=auto" in back else FRONT)).run(module)
    if "rendezvous" in back:
        for id_, channel in module.channels.items():
            module.channels[id_] = replace(channel, via="hccl")
    before = clone(module)
    PassManager(parse_pipeline(back), check=True).run(module)
    return before, module


def chooser(seed: int) -> Callable[[int], int]:
    return random.Random(seed).randrange


@pytest.mark.parametrize("back", BACKS)
@settings(max_examples=scaled(30))
@given(drawn=drawn_steps(), schedule=st.sampled_from(SCHEDULES), seed=st.integers(0, 99))
def test_programs_compute_what_the_step_does(
    back: str, drawn: Drawn, schedule: str, seed: int
) -> None:
    before, module = compile_step(drawn, back % schedule)
    assert parse_module(format_module(module)) == module
    world = World()
    expected = run_async(before, world)
    state = dict(world.written)
    assert run_again(module, world, seed) == expected
    assert world.written == state


@pytest.mark.parametrize("back", BACKS)
@pytest.mark.parametrize("seed", range(3))
def test_rows_of_experts_mean_what_the_step_does(back: str, seed: int) -> None:
    """And something else on each rank, and with other experts."""
    (file,) = [file for file in FILES if file.stem == "schedule-rows"]
    before = parse_module(read_cases(file)[0].source)
    PassManager(parse_pipeline("split-transfers")).run(before)
    module, world = clone(before), World()
    PassManager(parse_pipeline(back % "1f1b"), check=True).run(module)
    (ends,) = run_async(before, world).values()
    assert len(set(ends)) == 2
    assert run_again(module, world, seed) == {0: ends, 1: ()}
    for program in module.programs:
        for op in program.ops:
            if isinstance(op, RowCollective):
                op.experts = op.experts[::-1]
    assert not set(run_again(module, world, seed)[0]) & set(ends)


def run_again(module: Module, world: World, seed: int) -> dict[int, tuple[Meaning, ...]]:
    """What ranks return of scheduled programs, from the first state of actors on."""
    world.written.clear()
    world.accumulated.clear()
    machine = Machine(module, world, chooser(seed))
    assert machine.run()
    return machine.returned


@settings(max_examples=scaled(30))
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


def mutate(module: Module, rank: int, which: int, where: int) -> None:
    """Move one communication op of a rank to another place that its values and channel allow.

    The places are numbered from the first.
    """
    ops = module.programs[rank].ops
    movable = [i for i, op in enumerate(ops) if isinstance(op, COMMUNICATION)]
    if not movable:
        return
    at = movable[which % len(movable)]
    op = ops.pop(at)
    low = max((i + 1 for i, other in enumerate(ops) if follows(op, other, i < at)), default=0)
    high = min(
        (i for i, other in enumerate(ops) if follows(other, op, i >= at)), default=len(ops) - 1
    )
    ops.insert(low + where % (high - low + 1), op)


def follows(op: Op, other: Op, was_later: bool) -> bool:
    """True if `op` needs a result of `other`, or comes after it on its channel."""
    if not was_later:
        return False
    same = getattr(op, "chan", -1) == getattr(other, "chan", -2) and type(op) is type(other)
    # Nothing that is freed may be used afterwards.
    freed = isinstance(op, Free) and op.operands[0] in other.operands
    return same or freed or not set(op.operands).isdisjoint(other.results)


@pytest.mark.parametrize("back", BACKS)
@settings(max_examples=scaled(50))
@example(
    drawn=Drawn(
        *(3, 3, [2, 0, 0], [0], [[]], [True], False, True, True, None),
        saves=False,
        gathered=True,
    ),
    moves=[(2, 260, 5)],
    seed=0,
)
@given(
    drawn=drawn_steps(),
    moves=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 999), st.sampled_from([0, -1, 5])),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 99),
)
def test_mutants_are_judged_as_by_brute_force(
    back: str, drawn: Drawn, moves: Sequence[tuple[int, int, int]], seed: int
) -> None:
    drawn.microbatches = min(drawn.microbatches, 4)
    _, module = compile_step(drawn, back % "1f1b")
    for rank, which, where in moves:
        mutate(module, rank % module.world, which, where)
    try:
        verify(module)
    except IRError:
        assume(False)
    judge(module, seed)


def judge(module: Module, seed: int) -> None:
    """check-deadlock refuses a module exactly if brute force gets stuck in it, or hosts do."""
    try:
        finished = Machine(module, World(), chooser(seed)).run()
    except AssertionError:
        assume(False)  # a use after free: not what this checker is for
    if finished:
        said = refusal(module)
        assert said is None or ("its device" in said and Hosts(module).stand_still()), said
    else:
        with pytest.raises(IRError, match=r"deadlock|never freed"):
            PassManager(parse_pipeline("check-deadlock")).run(module)


@settings(max_examples=scaled(150))
@given(
    orders=st.lists(st.permutations(range(12)), min_size=2, max_size=3),
    streams=st.booleans(),
    slots=st.sampled_from([(None, None), (0, 1), (0, 0)]),
    seed=st.integers(0, 99),
)
def test_random_exchanges_are_judged_as_by_brute_force(
    orders: list[list[int]], streams: bool, slots: tuple[int | None, int | None], seed: int
) -> None:
    module = parse_module(exchange(orders, streams, slots))
    verify(module)
    judge(module, seed)


def exchange(
    orders: Sequence[Sequence[int]], streams: bool, slots: tuple[int | None, int | None]
) -> str:
    """Ranks in a ring: each sends two messages on and gets two, and all sum once, in any order."""
    world = len(orders)
    group = ",".join(map(str, range(world)))
    planned = "" if slots[0] is None else ", slot_bytes = 16, slots = 2"
    lines = [f"module @step phase=scheduled world={world} {{"]
    lines += [f"channel {r} {{ranks = {{{r},{(r + 1) % world}}}{planned}}}" for r in range(world)]
    lines.append(f"channel {world} {{collective = true, ranks = {{{group}}}}}")
    send, recv, collective = (
        f", stream = {name}" if streams else "" for name in ("send", "recv", "collective")
    )
    for rank, order in enumerate(orders):
        after, before = (rank + 1) % world, (rank - 1) % world
        ops = []
        for seq, slot in enumerate(slots):
            at = "" if slot is None else f", slot = {slot}"
            ops += [
                f"%s{seq} = send(%x) {{chan = {rank}, peer = {after}, seq = {seq}{at}{send}}} "
                ": future<unit>",
                f"wait(%s{seq})",
                f"%r{seq} = recv() {{chan = {before}, peer = {before}, seq = {seq}{at}{recv}}} "
                ": future<f32[4]>",
                f"%v{seq} = wait(%r{seq}) : f32[4]",
                f"free(%v{seq})",
            ]
        ops += [
            f"%a = all_reduce(%x) {{chan = {world}, group = {{{group}}}, op = sum, seq = 0"
            f"{collective}}} : future<f32[4]>",
            "%b = wait(%a) : f32[4]",
        ]
        lines.append(f"program @{rank}(%x: f32[4]) {{")
        lines += [ops[i] for i in in_a_legal_order(order)]
        lines += ["return()", "}"]
    return "\n".join([*lines, "}"])


# A wait follows what it waits for, a free its wait, and a channel's messages keep their order.
AFTER = {1: 0, 3: 2, 4: 3, 5: 0, 6: 5, 7: 2, 8: 7, 9: 8, 11: 10}


def in_a_legal_order(order: Sequence[int]) -> list[int]:
    found: list[int] = []
    left = list(order)
    while left:
        ready = next(i for i in left if AFTER.get(i, i) not in left or i not in AFTER)
        left.remove(ready)
        found.append(ready)
    return found


@settings(max_examples=scaled(30))
@given(drawn=drawn_steps(), lookahead=st.integers(1, 3))
def test_overlap_keeps_its_bound_and_the_order_of_messages(drawn: Drawn, lookahead: int) -> None:
    _, module = compile_step(drawn, "schedule{schedule=1f1b}")
    before = [([op for op in p.ops if isinstance(op, Recv)], in_flight(p)) for p in module.programs]
    PassManager(parse_pipeline(f"overlap{{lookahead={lookahead}}}")).run(module)
    for program, (receives, most) in zip(module.programs, before, strict=True):
        assert [op for op in program.ops if isinstance(op, Recv)] == receives
        for end, count in in_flight(program).items():
            # A receive is never posted later than it was, so there may be more of them.
            assert count <= max(lookahead, most[end])


def in_flight(program: Program) -> dict[tuple[type, int], int]:
    """For sends and receives of each channel, the most that are posted and not waited for."""
    now: dict[tuple[type, int], int] = {}
    most: dict[tuple[type, int], int] = {}
    ends = {}
    for op in program.ops:
        if isinstance(op, Send | Recv):
            end = ends[op.result] = type(op), op.chan
            now[end] = now.get(end, 0) + 1
            most[end] = max(most.get(end, 0), now[end])
        elif isinstance(op, Wait) and op.operands[0] in ends:
            now[ends[op.operands[0]]] -= 1
    return most


@settings(max_examples=scaled(20))
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
