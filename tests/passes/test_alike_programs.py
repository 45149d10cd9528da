"""Programs that are alike: which are, and that what tells them apart is still checked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.synthetic_groups import GroupSteps, group_module
from cg.ir.alike.alike_programs import AlikePrograms
from cg.ir.attributes import Stream
from cg.ir.ops import Call, Collective, Free, Recv, Slice, Wait
from cg.ir.ops.module import Module, Program
from cg.ir.text.diagnostics import IRError
from cg.ir.verify.verifier import verify
from cg.passes.check.check_races import CheckRaces
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline


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
