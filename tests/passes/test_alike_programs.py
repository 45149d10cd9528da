"""Programs that are alike: which are, and that what tells them apart is still checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.synthetic_groups import GroupSteps, group_module
from cg.ir.alike.alike_programs import AlikePrograms, alike_programs_of, count_ops, share
from cg.ir.attributes import Stream
from cg.ir.ops import Call, Collective, Free, Recv, Send, Slice, Wait
from cg.ir.ops.module import Module, Program
from cg.ir.text.diagnostics import IRError
from cg.ir.text.parser import parse_module
from cg.ir.text.printer import format_module
from cg.ir.verify.communication import Progress
from cg.ir.verify.verifier import verify
from cg.passes import schedules
from cg.passes.check.check_deadlock import CheckDeadlock
from cg.passes.check.check_races import CheckRaces
from cg.passes.lower.plan_buffers import PlanBuffers
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline
from cg.passes.order import project


def compiled() -> Module:
    """Two stages on groups of two by two ranks, whose experts' rows are exchanged."""
    module = group_module(GroupSteps(((2, 2),) * 2, microbatches=2, experts=4))
    PassManager(default_pipeline(dispatch="exchange")).run(module)
    return module


def test_ranks_of_a_group_have_programs_that_are_alike() -> None:
    module = compiled()
    assert isinstance(module.programs, AlikePrograms)
    groups = [list(group.variations) for group in module.programs.groups]
    assert groups == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("groups", "microbatches", "experts", "schedule", "in_flight"),
    [
        (((2, 2),) * 3, 4, 4, "1f1b", 1),
        (((2, 2),) * 2, 4, 4, "gpipe", 2),
        (((2, 2), (1, 4), 1), 3, 0, "zb-h1", 1),
        (((3, 2), (2, 3)), 3, 0, "1f1b", 1),
    ],
)
def test_programs_are_those_that_each_rank_has_by_itself(
    monkeypatch: pytest.MonkeyPatch,
    groups: tuple[int | tuple[int, int], ...],
    microbatches: int,
    experts: int,
    schedule: str,
    in_flight: int,
) -> None:
    def programs() -> Module:
        steps = GroupSteps(groups, microbatches=microbatches, experts=experts, rows=24)
        module = group_module(steps)
        pipeline = default_pipeline(
            schedules.by_name(schedule),
            dispatch="exchange" if experts else "auto",
            tasks_in_flight=in_flight,
        )
        PassManager(pipeline).run(module)
        return module

    shared = programs()
    assert isinstance(shared.programs, AlikePrograms)
    assert shared.programs.is_shared
    count = count_ops(shared)
    monkeypatch.setattr(project, "share", lambda programs, channels: list(programs))
    alone = programs()
    assert isinstance(alone.programs, list)
    assert format_module(shared, locations=True) == format_module(alone, locations=True)
    assert count == count_ops(alone)
    assert shared.programs.is_shared, "a module is printed without programs for all ranks"
    assert shared == alone


_RING = """
module @step phase=scheduled world=3 {{
  channel 0 {{ranks = {{0,1}}}}
  channel 1 {{ranks = {{1,2}}}}
  channel 2 {{ranks = {{2,0}}}}
{programs}
}}
"""
_EARLY = """  program @{rank}(%x: f32[2]) {{
    %s{rank} = send(%x) {{chan = {rank}, peer = {after}, seq = 0}} : future<unit>
    %r = recv() {{chan = {before}, peer = {before}, seq = 0}} : future<f32[2]>
    wait(%s{rank})
    %y = wait(%r) : f32[2]
    return(%y)
  }}"""
_LATE = """  program @{rank}(%x: f32[2]) {{
    %s{rank} = send(%x) {{chan = {rank}, peer = {after}, seq = 0}} : future<unit>
    wait(%s{rank})
    %r = recv() {{chan = {before}, peer = {before}, seq = 0}} : future<f32[2]>
    %y = wait(%r) : f32[2]
    return(%y)
  }}"""


def ring(program: str) -> Module:
    """Each of three ranks that are alike sends to the next one."""
    places = [{"rank": r, "after": (r + 1) % 3, "before": (r - 1) % 3} for r in range(3)]
    programs = "\n".join(program.format(**place) for place in places)
    return parse_module(_RING.format(programs=programs))


def test_ranks_that_are_alike_may_send_to_each_other() -> None:
    module = ring(_EARLY)
    alike = alike_programs_of(module)
    assert alike is not None
    assert len(alike.groups) == 1
    assert Progress(module, alike=alike).run()
    verify(module)
    CheckDeadlock().run(module)


def test_ranks_that_are_alike_and_wait_for_each_other_are_refused() -> None:
    module = ring(_LATE)
    assert alike_programs_of(module) is not None
    verify(module)
    with pytest.raises(IRError, match="would wait for each other for ever"):
        CheckDeadlock().run(module)


def test_a_channel_that_one_of_them_has_no_end_of_is_refused() -> None:
    """The channel from rank 1 to rank 2 is declared as one to rank 0."""
    module = ring(_EARLY)
    module.channels[1] = replace(module.channels[1], ranks=(1, 0))
    with pytest.raises(IRError):
        verify(module)


_UNLIKE_RECEIVERS = """
module @step phase=scheduled world=4 {
  channel 0 {ranks = {0,2}}
  channel 1 {ranks = {1,3}}
  program @0(%x: f32[2]) {
    %a = send(%x) {chan = 0, peer = 2, seq = 0} : future<unit>
    wait(%a)
    %b = send(%x) {chan = 0, peer = 2, seq = 1} : future<unit>
    wait(%b)
    return()
  }
  program @1(%x: f32[2]) {
    %c = send(%x) {chan = 1, peer = 3, seq = 0} : future<unit>
    wait(%c)
    %d = send(%x) {chan = 1, peer = 3, seq = 1} : future<unit>
    wait(%d)
    return()
  }
  program @2() {
    %r = recv() {chan = 0, peer = 0, seq = 0} : future<f32[2]>
    %y = wait(%r) : f32[2]
    %s = recv() {chan = 0, peer = 0, seq = 1} : future<f32[2]>
    %z = wait(%s) : f32[2]
    return()
  }
  program @3() {
    %r = recv() {chan = 1, peer = 1, seq = 0} : future<f32[2]>
    %s = recv() {chan = 1, peer = 1, seq = 1} : future<f32[2]>
    %y = wait(%r) : f32[2]
    %z = wait(%s) : f32[2]
    return()
  }
}
"""


def test_ranks_that_are_alike_may_need_other_slots() -> None:
    """Rank 2 has freed the first message before the second comes, and rank 3 has not."""
    module, alone = parse_module(_UNLIKE_RECEIVERS), parse_module(_UNLIKE_RECEIVERS)
    module.programs = share(module.programs, module.channels)
    assert isinstance(module.programs, AlikePrograms)
    for planned in (module, alone):
        PlanBuffers().run(planned)
        CheckDeadlock().run(planned)
    assert format_module(module) == format_module(alone)
    sends = [[op.slot for op in p.ops if isinstance(op, Send)] for p in module.programs]
    assert sends[:2] == [[0, 0], [0, 1]]


def rename(program: Program) -> None:
    first, second = [op for op in program.ops if isinstance(op, Call)][:2]
    second.results[0].name = first.results[0].name


def free_early(program: Program) -> None:
    index = next(i for i, op in enumerate(program.ops) if isinstance(op, Free))
    program.ops.insert(index, program.ops[index])


def leave_out_a_wait(program: Program) -> None:
    program.ops.remove(next(op for op in reversed(program.ops) if isinstance(op, Wait)))


def turn_to_another_peer(program: Program) -> None:
    next(op for op in program.ops if isinstance(op, Recv)).peer += 1


def cut_another_region(program: Program) -> None:
    piece = next(op for op in program.ops if isinstance(op, Slice))
    ((start, stop),), *rest = piece.region
    piece.region = ((start, stop + 1),), *rest


def change_streams(program: Program) -> None:
    next(op for op in program.ops if isinstance(op, Call)).stream = Stream.SEND


def leave_a_group(program: Program) -> None:
    collectives = [op for op in program.ops if isinstance(op, Collective)]
    chan = next(op.chan for op in collectives if op.chan != collectives[0].chan)
    collectives[0].chan = chan


@pytest.mark.parametrize(
    "spoil",
    [
        rename,
        free_early,
        leave_out_a_wait,
        turn_to_another_peer,
        cut_another_region,
        change_streams,
        leave_a_group,
    ],
)
def test_what_is_wrong_in_one_of_them_is_refused(spoil: Callable[[Program], None]) -> None:
    module = compiled()
    rank = 3 if spoil is cut_another_region else 7
    spoil(module.program_of(rank))
    with pytest.raises(IRError) as caught:
        verify(module)
    programs = [diagnostic.program for diagnostic in caught.value.diagnostics]
    assert module.program_of(rank) in programs


def test_all_of_them_are_refused_if_they_are_wrong_alike() -> None:
    """A free in front of the last use, in all ranks of a stage: each has its diagnostic."""
    module = compiled()
    ranks = [4, 5, 6, 7]
    for rank in ranks:
        ops = module.program_of(rank).ops
        free = next(op for op in ops if isinstance(op, Free) and len(op.operands) > 1)
        ops.remove(free)
        wait = next(op for op in ops if free.operands[1] in op.results)
        ops.insert(ops.index(wait), Free((free.operands[0],), stream=free.stream))
    with pytest.raises(IRError) as caught:
        CheckRaces().run(module)
    assert {d.program.rank for d in caught.value.diagnostics if d.program} == set(ranks)
