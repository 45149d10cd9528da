"""The memory that `plan-buffers` foresees, and the grid that dumps show."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cg.ir.ops.module import Module
from cg.passes import schedules
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline
from cg.passes.manager.registry import OptionError, parse_pipeline
from cg.passes.simulate.memory_plan import memory_plan
from cg.passes.simulate.program_grid import format_grid

Read = Callable[[str], Module]
Make = Callable[[int, int], Module]


def compiled(module: Module, schedule: str) -> Module:
    PassManager(default_pipeline(schedules.by_name(schedule)), check=True).run(module)
    return module


def test_the_grid_shows_1f1b(pipeline_module: Make) -> None:
    assert format_grid(compiled(pipeline_module(3, 4), "1f1b")).splitlines() == [
        "rank 0 | 0F0 0F1 0F2 .   .   0B0 0F3 0B1 .   0B2 .   0B3",
        "rank 1 | .   1F0 1F1 .   1B0 1F2 1B1 1F3 1B2 .   1B3 .",
        "rank 2 | .   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 .   .",
    ]


def test_the_grid_shows_gpipe(pipeline_module: Make) -> None:
    assert format_grid(compiled(pipeline_module(2, 3), "gpipe")).splitlines() == [
        "rank 0 | 0F0 0F1 0F2 .   .   0B0 0B1 0B2",
        "rank 1 | .   1F0 1F1 1F2 1B0 1B1 1B2 .",
    ]


def test_a_step_without_microbatches_has_an_empty_grid(read: Read) -> None:
    module = read(
        """
        module @step phase=scheduled world=1 {
          program @0() {
            return()
          }
        }
        """
    )
    assert format_grid(module) == "rank 0 |\n"


def values_held(make: Make, schedule: str, microbatches: int) -> list[int]:
    module = compiled(make(4, microbatches), schedule)
    return [memory_plan(module, rank).values for rank in range(4)]


def test_1f1b_holds_no_more_with_more_microbatches_and_gpipe_does(pipeline_module: Make) -> None:
    few, many = (values_held(pipeline_module, "1f1b", m) for m in (8, 16))
    # The last rank also keeps a loss and its gradient, of 4 bytes each, for every microbatch.
    assert few[:3] == many[:3]
    assert many[3] - few[3] <= 2 * 4 * 8
    saved = 2 * 8 * 4
    few, many = (values_held(pipeline_module, "gpipe", m) for m in (8, 16))
    assert all(b - a >= 8 * saved for a, b in zip(few, many, strict=True))


def test_memory_counts_inputs_slots_and_values(read: Read) -> None:
    module = read(
        """
        module @step phase=scheduled world=2 {
          function @f(f32[2]) -> (f32[2])
          channel 0 {ranks = {0..1}}
          program @0(%x: f32[2], %o: object) {
            %x.send = send(%x) {chan = 0, peer = 1, seq = 0} : future<unit>
            wait(%x.send)
            return()
          }
          program @1() {
            %a.recv = recv() {chan = 0, peer = 0, seq = 0} : future<f32[2]>
            %a = wait(%a.recv) : f32[2]
            %h = call(%a) {fn = @f} : f32[2]
            %g = call(%h) {fn = @f} : f32[2]
            %z = call(%g) {fn = @f} : f32[2]
            return(%z)
          }
        }
        """
    )
    PassManager(parse_pipeline("plan-buffers"), check=True).run(module)
    first, second = memory_plan(module, 0), memory_plan(module, 1)
    assert (first.inputs, first.slots, first.values, first.outputs) == (8, 0, 0, 0)
    # Two of h, g and z are alive at once.
    assert (second.inputs, second.slots, second.values, second.outputs) == (0, 8, 16, 8)
    assert second.peak == 24


def test_memory_counts_what_slices_copy_and_what_is_assembled(read: Read) -> None:
    module = read(
        """
        module @step phase=scheduled world=1 {
          program @0(%x: f32[8]) {
            %view = slice(%x) {region = [0:4]} : f32[4]
            %copy = slice(%x) {region = [0:2+4:6]} : f32[4]
            %y = assemble(%view, %copy) {regions = {[0:4], [4:8]}} : f32[8]
            return(%y)
          }
        }
        """
    )
    plan = memory_plan(module, 0)
    assert (plan.inputs, plan.values, plan.outputs) == (32, 16 + 32, 32)


def test_memory_counts_a_sum_in_place_once_and_until_it_is_read(read: Read) -> None:
    module = read(
        """
        module @step phase=scheduled world=2 {
          function @f() -> (f32[8])
          function @g(f32[8]) -> (f32[2])
          function @h(f32[2]) -> (f32[8])
          channel 0 {collective = true, ranks = {0..1}}
          program @0() {
            %s = call() {fn = @f} : f32[8]
            %t.all = all_reduce(%s) {chan = 0, donated = true, group = {0..1}, op = sum, seq = 0} : future<f32[8]>
            %t = wait(%t.all) : f32[8]
            %y = call(%t) {fn = @g} : f32[2]
            %z = call(%y) {fn = @h} : f32[8]
            return(%z)
          }
          program @1() {
            %s = call() {fn = @f} : f32[8]
            %t.all = all_reduce(%s) {chan = 0, donated = true, group = {0..1}, op = sum, seq = 0} : future<f32[8]>
            %t = wait(%t.all) : f32[8]
            %y = call(%t) {fn = @g} : f32[2]
            %z = call(%y) {fn = @h} : f32[8]
            return(%z)
          }
        }
        """  # noqa: E501
    )
    PassManager(parse_pipeline("plan-buffers"), check=True).run(module)
    assert memory_plan(module, 0).values == 32 + 8  # s or z, whose sum is gone by then, beside y


def test_buffers_are_planned_once(pipeline_module: Make) -> None:
    module = compiled(pipeline_module(2, 2), "1f1b")
    (report,) = PassManager(parse_pipeline("plan-buffers"), check=True).run(module)
    assert not report.changed


def test_streams_are_assigned_and_stages_labelled_once(pipeline_module: Make) -> None:
    module = pipeline_module(2, 2)
    reports = PassManager(parse_pipeline("assign-stages,assign-stages"), check=True).run(module)
    assert [report.changed for report in reports] == [True, False]
    module = compiled(pipeline_module(2, 2), "1f1b")
    (report,) = PassManager(parse_pipeline("assign-streams"), check=True).run(module)
    assert not report.changed


def test_overlap_needs_room_for_one_message() -> None:
    with pytest.raises(ValueError, match="lookahead is at least 1, not 0"):
        parse_pipeline("overlap{lookahead=0}")


def test_the_schedule_pass_reads_the_name_of_a_schedule() -> None:
    (step,) = parse_pipeline("schedule{schedule=gpipe}")
    assert str(step) == "schedule{schedule=gpipe}"
    with pytest.raises(OptionError, match="no schedule 'zigzag'"):
        parse_pipeline("schedule{schedule=zigzag}")
    with pytest.raises(OptionError, match="has no option 'order'"):
        parse_pipeline("schedule{order=gpipe}")
