"""The default pipeline: complete, in order, and near-linear in what it makes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cg.ir.ops import Call
from cg.ir.ops.clone import clone
from cg.ir.ops.module import Module
from cg.ir.phases import Phase
from cg.ir.verify.verifier import verify
from cg.passes.manager.manager import PassManager, check_pipeline
from cg.passes.manager.pipelines import default_pipeline
from cg.passes.manager.registry import Switches, names, parse_pipeline, parse_switches
from cg.passes.placement.fabrics import Fabrics
from cg.passes.schedules import gpipe, one_f_one_b

Make = Callable[[int, int], Module]


def test_it_leads_from_traced_to_scheduled() -> None:
    assert check_pipeline(default_pipeline(), Phase.TRACED) is Phase.SCHEDULED


def test_every_pass_stands_in_it() -> None:
    switches = parse_switches(every("+"))
    pipeline = default_pipeline(None, switches, Fabrics("a"), in_flight=2, fuse="inductor")
    standing = {pass_.name for pass_ in pipeline}
    assert standing == set(names())


def every(sign: str) -> str:
    """All passes that can be, switched."""
    found = []
    for name in names():
        try:
            parse_switches(f"{sign}{name}")
        except ValueError:
            continue
        found.append(f"{sign}{name}")
    return ",".join(found)


@pytest.mark.parametrize("switches", ["", "-dce", "-cse", "-place", every("-"), every("+")])
@pytest.mark.parametrize("schedule", [gpipe(), one_f_one_b()])
def test_a_training_step_compiles_with_any_switches(
    pipeline_module: Make, switches: str, schedule: object
) -> None:
    module = pipeline_module(3, 4)
    PassManager(default_pipeline(schedule, parse_switches(switches)), check=True).run(module)
    verify(module)
    assert [program.rank for program in module.programs] == [0, 1, 2]


def test_a_call_and_its_backward_are_of_one_stage(pipeline_module: Make) -> None:
    module = pipeline_module(2, 2)
    PassManager(parse_pipeline("assign-stages,differentiate")).run(module)
    tasks = {
        (op.fn.name, op.mb): str(op.task)
        for op in module.program.ops
        if isinstance(op, Call) and op.task is not None
    }
    assert tasks["stage0.forward.fwd", 1] == "0F1"
    assert tasks["stage0.forward.bwd", 1] == "0B1"
    assert tasks["stage1.loss.fwd", 0] == "1F0"
    assert tasks["stage1.loss.bwd", 0] == "1B0"


def test_ops_grow_linearly_with_ranks_and_microbatches(pipeline_module: Make) -> None:
    pipeline = parse_pipeline(
        "dce,assign-stages,differentiate,cse,place,dce,insert-transfers,split-transfers"
    )
    sizes = {}
    for ranks, microbatches in ((2, 4), (2, 8), (4, 4), (4, 8)):
        module = pipeline_module(ranks, microbatches)
        PassManager(pipeline).run(module)
        sizes[ranks, microbatches] = len(module.program.ops)
    # Each further rank and microbatch adds the same number of ops: the mixed difference of
    # doubling both is what one quarter of the larger module adds.
    per_cell = sizes[4, 8] - sizes[2, 8] - sizes[4, 4] + sizes[2, 4]
    assert per_cell == 2 * 4 * (2 + 2 * 4)  # forward, backward; a message each, of four ops


def test_a_clone_compiles_to_the_same(pipeline_module: Make) -> None:
    module = pipeline_module(2, 3)
    twin = clone(module)
    for one in (module, twin):
        PassManager(default_pipeline(switches=Switches())).run(one)
    assert module == twin


def test_only_executions_that_may_overlap_have_tails() -> None:
    for in_flight in (0, 1, 2):
        found = [pass_.name for pass_ in default_pipeline(None, None, Fabrics("a"), in_flight)]
        assert ("split-tails" in found) == (in_flight > 1)
