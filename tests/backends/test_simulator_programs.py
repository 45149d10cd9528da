"""Scheduled programs on paper: times, what is exposed, what is held."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cg.ir.ops import Call
from cg.ir.ops.module import Module
from cg.ir.pipeline.costs import Costs, Link
from cg.ir.text.diagnostics import IRError
from cg.passes import schedules
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline
from cg.passes.manager.registry import Switches
from cg.passes.schedules import Pipeline, Schedule
from cg.passes.simulate.memory_plan import memory_plan
from cg.passes.simulate.program_simulator import ProgramSimulation, simulate_programs
from cg.passes.simulate.schedule_simulator import simulate

from .programs import CHAIN, exchange, local, module

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def make() -> Callable[[int, int], Module]:
    """`benchmarks/synthetic.py`'s maker of traced modules: (ranks, microbatches)."""
    made = runpy.run_path(str(ROOT / "benchmarks" / "synthetic.py"))["pipeline_module"]
    assert callable(made)
    return made  # type: ignore[no-any-return]


def compiled(made: Module, schedule: Schedule, switches: Switches | None = None) -> Module:
    PassManager(default_pipeline(schedule, switches)).run(made)
    return made


def busy(found: ProgramSimulation) -> list[float]:
    return [rank.busy for rank in found.ranks]


LINES = [schedules.by_name(name) for name in ("gpipe", "1f1b", "zb-h1")]


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 8), (4, 3), (6, 12)])
@pytest.mark.parametrize("tcomm", [0.0, 0.5])
@pytest.mark.parametrize("schedule", LINES, ids=str)
def test_programs_take_as_long_as_their_schedule(
    make: Callable[[int, int], Module], schedule: Schedule, p: int, m: int, tcomm: float
) -> None:
    costs = Costs(3.0, 2.0, 2.0, tcomm)
    found = simulate_programs(compiled(make(p, m), schedule), costs)
    stage_ranks = tuple(range(p))
    expected = simulate(schedule(Pipeline(stage_ranks, m)), stage_ranks, m, costs)
    assert found.makespan == pytest.approx(expected.makespan)
    assert found.end == pytest.approx(expected.end)
    assert found.bubble_ratio == pytest.approx(expected.bubble_ratio)
    assert busy(found) == pytest.approx(expected.busy)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (6, 12)])
def test_messages_wait_for_receives_that_are_posted_late(
    make: Callable[[int, int], Module], p: int, m: int
) -> None:
    """With many forwards ahead, a receive may be posted after its message could have left."""
    stage_ranks, tcomm = tuple(range(p)), 0.5
    made = compiled(make(p, m), schedules.zb_h2())
    order = schedules.zb_h2()(Pipeline(stage_ranks, m))
    for late in (0.0, tcomm):
        costs = Costs(3.0, 2.0, 2.0, late)
        found = simulate_programs(made, costs).makespan
        expected = simulate(order, stage_ranks, m, costs).makespan
        assert expected - 1e-9 <= found <= expected + late + 1e-9


def test_calls_of_a_task_share_its_time_and_functions_come_first(
    make: Callable[[int, int], Module],
) -> None:
    made = compiled(make(2, 2), schedules.one_f_one_b())
    # The last stage has a forward and a loss in each F, and their backwards in each B.
    spans = {
        (str(span.op.task), span.op.fn.name): span.end - span.start
        for span in simulate_programs(made, Costs(3.0, 2.0, 2.0)).spans
        if isinstance(span.op, Call)
    }
    assert spans["1F0", "stage1.forward.fwd"] == spans["1F0", "stage1.loss.fwd"] == 1.5
    costs = Costs(3.0, 2.0, 2.0, functions={"stage1.loss.fwd": 7.0, "stage0.update": 5.0})
    found = simulate_programs(made, costs)
    assert busy(found) == [2 * 7.0 + 5.0, 2 * (7.0 + 3.0 + 4.0)]


def test_a_call_and_a_message_have_their_overheads() -> None:
    times = {"a.inc": 1.0, "b.double": 2.0, "c.dec": 3.0}
    costs = Costs(functions=times, overhead=0.25, post=0.5, link=Link(4.0))
    found = simulate_programs(module(CHAIN), costs)
    assert [(span.start, span.end) for span in found.spans] == [
        (0.0, 1.0),
        (5.75, 7.75),
        (12.5, 15.5),
    ]
    assert busy(found) == [1.0, 2.0, 3.0]


def test_what_is_exposed_is_the_travelling_part_of_a_wait() -> None:
    costs = Costs(functions={"a.inc": 1.0, "b.double": 2.0, "c.dec": 3.0}, link=Link(0.25, 1e-6))
    found = simulate_programs(module(CHAIN), costs)
    # 16 bytes at a byte a millisecond, and latency: each message takes 16.25.
    assert [(rank.start, rank.end) for rank in found.ranks] == [
        (0.0, 1.0),
        (17.25, 19.25),
        (35.5, 38.5),
    ]
    assert [rank.blocked for rank in found.ranks] == [0.0, 0.0, 0.0]
    assert found.end == 38.5
    assert found.makespan == 3.0
    assert found.bubble_ratio == pytest.approx(1 - 2 / 3)


TWICE = """
module @twice phase=scheduled world=2 {
  function @a.slow(f32[4]) -> (f32[4]) {actor = a, effect = pure, kind = opaque}
  function @b.quick(f32[4]) -> (f32[4]) {actor = b, effect = pure, kind = opaque}
  channel 0 {ranks = {0..1}}
  program @0(%x: f32[4]) {
    %h = call(%x) {fn = @a.slow} : f32[4]
    %s = send(%h) {chan = 0, peer = 1, seq = 0} : future<unit>
    wait(%s)
    return()
  }
  program @1(%x: f32[4]) {
    %r = recv() {chan = 0, peer = 0, seq = 0} : future<f32[4]>
    %a = call(%x) {fn = @b.quick} : f32[4]
    %v = wait(%r) : f32[4]
    %b = call(%v) {fn = @b.quick} : f32[4]
    return(%a, %b)
  }
}
"""


def test_waiting_for_work_is_not_exposed_communication() -> None:
    costs = Costs(functions={"a.slow": 10.0, "b.quick": 1.0}, channels={0: Link(2.0)})
    _, second = simulate_programs(module(TWICE), costs).ranks
    assert (second.busy, second.blocked, second.exposed) == (2.0, 11.0, 2.0)
    assert second.span == 13.0


LATE = """
module @late phase=scheduled world=2 {
  function @a.work(f32[4]) -> (f32[4]) {actor = a, effect = pure, kind = opaque}
  function @b.work(f32[4]) -> (f32[4]) {actor = b, effect = pure, kind = opaque}
  channel 0 {ranks = {0..1}, slot_bytes = 16, slots = 1}
  program @0(%x: f32[4]) {
    %s0 = send(%x) {chan = 0, peer = 1, seq = 0, slot = 0} : future<unit>
    wait(%s0)
    %h = call(%x) {fn = @a.work} : f32[4]
    %s1 = send(%h) {chan = 0, peer = 1, seq = 1, slot = 0} : future<unit>
    wait(%s1)
    return()
  }
  program @1(%x: f32[4]) {
    %b = call(%x) {fn = @b.work} : f32[4]
    %r0 = recv() {chan = 0, peer = 0, seq = 0, slot = 0} : future<f32[4]>
    %v0 = wait(%r0) : f32[4]
    %c = call(%v0) {fn = @b.work} : f32[4]
    free(%v0)
    %r1 = recv() {chan = 0, peer = 0, seq = 1, slot = 0} : future<f32[4]>
    %v1 = wait(%r1) : f32[4]
    %d = call(%v1) {fn = @b.work} : f32[4]
    return(%b, %c, %d)
  }
}
"""


def test_buffered_messages_need_their_slot_and_not_their_receive() -> None:
    costs = Costs(functions={"a.work": 1.0, "b.work": 4.0}, link=Link(0.5))
    text = LATE.replace("return(%b, %c, %d)", "free(%v1) return(%b, %c, %d)")
    strict, buffered = (
        [(span.rank, span.start) for span in simulate_programs(module(text), each).spans]
        for each in (costs, replace(costs, buffered=True))
    )
    # The first message waits for its receive, the second for its slot as well.
    assert strict == [(0, 4.5), (1, 0.0), (1, 4.5), (1, 9.0)]
    assert buffered == [(0, 0.5), (1, 0.0), (1, 4.0), (1, 8.5)]


STREAMS = """
module @streams phase=scheduled world=2 {
  function @b.use(f32[4]) -> (f32[4]) {actor = b, effect = pure, kind = opaque}
  channel 0 {ranks = {0..1}}
  program @0(%x: f32[4]) {
    %s0 = send(%x) {chan = 0, peer = 1, seq = 0, stream = send} : future<unit>
    %s1 = send(%x) {chan = 0, peer = 1, seq = 1, stream = send} : future<unit>
    wait(%s0) {stream = compute}
    wait(%s1) {stream = compute}
    return()
  }
  program @1() {
    %r0 = recv() {chan = 0, peer = 0, seq = 0, stream = recv} : future<f32[4]>
    %r1 = recv() {chan = 0, peer = 0, seq = 1, stream = recv} : future<f32[4]>
    %a = wait(%r0) {stream = compute} : f32[4]
    %c = call(%a) {fn = @b.use, stream = compute} : f32[4]
    %b = wait(%r1) {stream = compute} : f32[4]
    %d = call(%b) {fn = @b.use, stream = compute} : f32[4]
    return(%c, %d)
  }
}
"""


def test_messages_of_a_stream_travel_one_after_the_other() -> None:
    costs = Costs(functions={"b.use": 1.0}, link=Link(2.0))
    found = simulate_programs(module(STREAMS), costs)
    assert [(span.start, span.end) for span in found.spans] == [(2.0, 3.0), (4.0, 5.0)]


def test_collectives_move_what_rings_move() -> None:
    text = """
module @reduce phase=scheduled world=4 {
  function @use(f32[1000]) -> (f32[1000]) {effect = pure, kind = graph}
  channel 0 {collective = true, ranks = {0..3}}
""" + "".join(
        f"""  program @{rank}(%x: f32[1000]) {{
    %f = all_reduce(%x) {{chan = 0, group = {{0..3}}, op = sum, seq = 0}} : future<f32[1000]>
    %v = wait(%f) : f32[1000]
    %y = call(%v) {{fn = @use}} : f32[1000]
    return(%y)
  }}
"""
        for rank in range(4)
    )
    costs = Costs(functions={"use": 1.0}, link=Link(0.0, 0.001))
    found = simulate_programs(module(text + "}\n"), costs)
    # Twice three quarters of 4000 bytes, at a thousand bytes a millisecond.
    assert [rank.start for rank in found.ranks] == [6.0] * 4


def test_overlap_hides_what_a_blocking_program_exposes(make: Callable[[int, int], Module]) -> None:
    costs = Costs(3.0, 2.0, 2.0, 0.5)
    schedule = schedules.one_f_one_b()
    without = simulate_programs(
        compiled(make(4, 8), schedule, Switches(off=frozenset({"overlap"}))), costs
    )
    hidden = simulate_programs(compiled(make(4, 8), schedule), costs)
    assert hidden.makespan < without.makespan


def test_programs_that_wait_for_ever_are_refused() -> None:
    text = exchange("send sent recv got", "send sent recv got")
    with pytest.raises(IRError, match="these programs wait for each other for ever"):
        simulate_programs(module(text), Costs())


def bytes_of(functions: str, params: str, ops: str) -> int:
    made = module(local(functions, params, ops))
    return memory_plan(made, 0).peak


ONE = "function @f(f32[4]) -> (f32[4]) {effect = pure, kind = graph}"


def test_bytes_are_held_until_they_are_freed() -> None:
    kept = "%a = call(%x) {fn = @f} : f32[4]\n%b = call(%a) {fn = @f} : f32[4]\n"
    assert bytes_of(ONE, "%x: f32[4]", kept + "return(%b)") == 48
    more = "free(%a)\n%c = call(%b) {fn = @f} : f32[4]\nreturn(%c)"
    assert bytes_of(ONE, "%x: f32[4]", kept + more) == 48
    assert bytes_of(ONE, "%x: f32[4]", kept + more.replace("free(%a)\n", "")) == 64


def test_views_and_aliases_hold_nothing_of_their_own() -> None:
    view = "%v = view(%x) {dim = 0, start = 0, length = 2} : f32[2]\nreturn(%v)"
    assert bytes_of("", "%x: f32[4]", view) == 16
    shared = "function @f(f32[4]) -> (f32[4]) {aliases = {0 -> 0}, effect = pure, kind = graph}"
    call = "%y = call(%x) {fn = @f} : f32[4]\nreturn(%y)"
    assert bytes_of(shared, "%x: f32[4]", call) == 16
    assert bytes_of(ONE, "%x: f32[4]", call) == 32


def test_objects_count_as_nothing() -> None:
    text = "function @f(object) -> (object) {effect = pure, kind = graph}"
    assert bytes_of(text, "%x: object", "%y = call(%x) {fn = @f} : object\nreturn(%y)") == 0


def test_a_slot_counts_for_the_rank_that_receives_into_it() -> None:
    text = CHAIN.replace("{ranks = {0..1}}", "{ranks = {0..1}, slot_bytes = 64, slots = 3}")
    plain, slotted = module(CHAIN), module(text, check=False)
    more = [memory_plan(slotted, rank).peak - memory_plan(plain, rank).peak for rank in range(3)]
    assert more == [0, 3 * 64, 0]


def test_1f1b_holds_less_than_gpipe(make: Callable[[int, int], Module]) -> None:
    gpipe, one_f_one_b = (
        simulate_programs(compiled(make(2, 8), schedule), Costs())
        for schedule in (schedules.gpipe(), schedules.one_f_one_b())
    )
    for more, less in zip(gpipe.ranks, one_f_one_b.ranks, strict=True):
        assert less.peak_bytes < more.peak_bytes
